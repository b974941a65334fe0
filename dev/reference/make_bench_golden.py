#!/usr/bin/env python3
"""Runs lm-evaluation-harness on the model and the questions of tests/bench_golden.py: log-likelihoods
and scores, for tests/test_benchmark.sh.

    pip install lm_eval torch transformers
    dev/reference/make_bench_golden.py       # writes tests/golden/bench.json
"""
import json, os, sys, tempfile

import lm_eval
from datasets import Dataset
from lm_eval.models.huggingface import HFLM

TESTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../tests")
sys.path.insert(0, TESTS)
from bench_golden import questions, write_model

MAX_SEQLENS = 512, 24  # contexts are cut to the second


def task_of(name, records):
    """Returns the task as lm_eval takes it."""
    several = isinstance(records[0]["context"], list)
    config = {"task": name, "custom_dataset": lambda **_: {"test": Dataset.from_list(records)}, "test_split": "test",
              "output_type": "multiple_choice", "target_delimiter": records[0].get("delimiter", " "),
              "doc_to_text": lambda doc: doc["context"], "doc_to_choice": lambda doc: doc["choices"],
              "doc_to_target": lambda doc: doc["answer"],
              "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]}
    if several:  # the choices are in the contexts
        config.update(doc_to_text=lambda doc: doc["answer"], doc_to_choice=lambda doc: doc["context"],
                      doc_to_target=lambda doc: doc["choices"][0])
    return config


def make():
    golden = {}
    with tempfile.TemporaryDirectory() as directory:
        for model in "model", "model_bos":
            write_model(os.path.join(directory, model), model == "model_bos")
            for most in MAX_SEQLENS:
                lm = HFLM(os.path.join(directory, model), device="cpu", dtype="float32", batch_size=1, max_length=most)
                for name, records in questions().items():
                    out = lm_eval.simple_evaluate(lm, tasks=[task_of(name, records)], bootstrap_iters=9)
                    scores, samples = out["results"][name], out["samples"][name]
                    samples.sort(key=lambda s: s["doc_id"])
                    golden["%s %d %s" % (model, most, name)] = {
                        "log_likelihoods": [[round(r[0][0], 6) for r in s["resps"]] for s in samples],
                        "acc": scores["acc,none"], "acc_norm": scores["acc_norm,none"],
                        "acc_stderr": scores["acc_stderr,none"], "acc_norm_stderr": scores["acc_norm_stderr,none"]}
    with open(os.path.join(TESTS, "golden/bench.json"), "w") as f:
        f.write("{\"made_by\": \"lm_eval %s\"" % lm_eval.__version__)
        f.writelines(",\n%s: %s" % (json.dumps(key), json.dumps(value)) for key, value in golden.items())
        f.write("}\n")


if __name__ == "__main__":
    make()
