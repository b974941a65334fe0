#!/usr/bin/env python3
"""How a step scales: with the tokens of a micro-batch, the lengths of documents, and the model.

    dev/scaling.py [--record]       records dev/results/scaling-BACKEND-DATE.csv, a run a line

Sweeps
  tokens   packed micro-batches of web pages (R65, cut at 1024), 512 tokens and more
  lengths  the same number of tokens in short, chat, web, long, equal and giant documents: packed,
           padded to the longest document, and in rows of 2048 tokens or of the longest document
  model    chats, packed and padded, for each of --models
Every run takes one step that is not timed and --repeats that are. planned_mib and peak_mib are the
device's memory, process_mib is that of the process.
"""
import argparse
import csv
import io
import os
import statistics

import measure

ROW_LEN = 2048      # of rows of concatenated documents, unless a document is longer
FIELDS = ("sweep model lengths layout documents tokens row_len fill pairs step_ms step_ms_min "
          "step_ms_max tokens_per_s planned_mib peak_mib process_mib loss").split()


def lengths_of(law, tokens, cap=8192):
    """Documents of about `tokens` tokens in all"""
    if law == "seed":
        return measure.SEED_BATCH * max(1, round(tokens / sum(measure.SEED_BATCH)))
    return [int(n) for n in measure.run(
        "python3", "dev/shard.py", "--dist", law, "--tokens", tokens, "--length",
        min(512, tokens), "--cap", max(cap, tokens if law == "giant" else 0),
        "--print-lengths", "--out", "-").split()]


def sweeps(o):
    """(sweep, model, law, layout, lengths)"""
    tokens = o.least_tokens
    while tokens <= o.tokens * 2:
        yield "tokens", o.model, "r65", "packed", lengths_of("r65", tokens, min(tokens, 1024))
        tokens *= 2
    for law in ("short", "chat", "r65", "seed", "long", "equal", "giant"):
        for layout in ("packed", "rows", "padded"):
            yield "lengths", o.model, law, layout, lengths_of(law, o.tokens)
    for model in o.models:
        for layout in ("packed", "padded"):
            yield "model", model, "chat", layout, lengths_of("chat", o.model_tokens)


def measured(o, sweep, model, law, layout, lengths):
    row_len, tokens = max(lengths), sum(lengths)
    if layout == "rows":
        row_len = max(row_len, ROW_LEN)
    r = measure.train(model, layout, lengths, row_len, max(tokens, o.tokens), o.repeats)
    ms = statistics.median(r["ms"])
    values = (sweep, os.path.basename(model), law, layout, len(lengths), tokens, row_len,
              round(r["fill"], 4), r["pairs"], *(round(x, 1) for x in (
                  ms, min(r["ms"]), max(r["ms"]), tokens / ms * 1e3, r["planned_mib"],
                  r["peak_mib"], r["rss_mib"])), r["loss"])
    return dict(zip(FIELDS, values))


def where_it_pays(say, runs):
    """packed against padded and rows for each distribution, in plain words"""
    times = {(r["lengths"], r["layout"]): r for r in runs if r["sweep"] == "lengths"}
    say("", "lengths   padded's fill   padded / packed time   rows' fill   rows, if full / packed time")
    for law in dict.fromkeys(law for law, _ in times):
        packed, rows, padded = (times[law, layout] for layout in ("packed", "rows", "padded"))
        say(f"{law:9} {100 * padded['fill']:11.1f} %   {padded['step_ms'] / packed['step_ms']:19.2f}x"
            f"   {100 * rows['fill']:9.1f} %   "
            f"{rows['step_ms'] * rows['fill'] / packed['step_ms']:26.2f}x")
    say("Packing removes padding: about 1 / fill against padded rows, more where attention over "
        "padding is a large part, and nothing where rows are full (equal and giant documents). "
        "Against full rows of concatenated documents it saves the attention across documents.")


def arguments():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--model", help="of the sweeps over tokens and lengths (CPU: demo)")
    p.add_argument("--models", nargs="+", help="of the sweep over models")
    p.add_argument("--least-tokens", type=int, default=512)
    p.add_argument("--tokens", type=int, help="of a step of the sweep over lengths (8192, GPU 32768)")
    p.add_argument("--model-tokens", type=int, help="of the sweep over models (2048, GPU 32768)")
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--record", action="store_true", default=os.environ.get("RECORD") == "1")
    o = p.parse_args()
    on_cpu = measure.backend() == "cpu"
    o.model = o.model or ("demo" if on_cpu else "smollm2-135m")
    o.models = o.models or (["demo", "smollm2-135m"] if on_cpu else
                            ["smollm2-135m", "smollm2-360m", "smollm2-1.7b"])
    o.tokens = o.tokens or (8192 if on_cpu else 32768)
    o.model_tokens = o.model_tokens or (2048 if on_cpu else 32768)
    return o


def main():
    os.chdir(measure.ROOT)
    o, say, runs, text = arguments(), measure.Record("scaling"), [], io.StringIO()
    writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
    writer.writeheader()
    say("", "sweep    model         lengths  layout  docs  tokens   step ms  tokens/s  planned MiB"
        "  peak MiB")
    for run in sweeps(o):
        r = measured(o, *run)
        runs.append(r)
        writer.writerow(r)
        say(f"{r['sweep']:8} {r['model']:13} {r['lengths']:8} {r['layout']:7} {r['documents']:4} "
            f"{r['tokens']:7} {r['step_ms']:9.1f} {r['tokens_per_s']:9.1f} {r['planned_mib']:12.1f} "
            f"{r['peak_mib']:9.1f}")
    where_it_pays(say, runs)
    if o.record:
        say.write()
        measure.write_whole(say.path(".csv"), text.getvalue())


main()
