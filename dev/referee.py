#!/usr/bin/env python3
"""Does another trainer's packing change the result? Holds transformers and TRL to a kit of ours.

    ./train_llama --model DIR --train DATA --check-packing=kit.json && dev/referee.py kit.json DIR

Documents, among them one of one token and one that is masked whole, must have the loss that they
have alone, the step its loss and gradient norm, also over micro-batches, and no loss may change when
a token of another document does. fp32 on the CPU. Needs torch, transformers, trl and datasets.
"""
import copy, json, sys, torch, transformers, trl, trl.trainer.sft_trainer as sft, datasets
from torch.nn.functional import cross_entropy

datasets.disable_progress_bars()
transformers.logging.set_verbosity_error()
kit = json.load(open(sys.argv[1]))
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.float32)
spans = zip([0] + kit["document_ends"], kit["document_ends"])
documents = [{key: kit[key][a:b] for key in ("input_ids", "labels")} for a, b in spans]
documents += [{"input_ids": [5, 6, 7][:n], "labels": [-100] * n} for n in (1, 3)]
moved = copy.deepcopy(documents)
moved[0]["input_ids"][1] ^= 1
expected = torch.tensor(kit["loss_sums"] + [0.0, 0.0])
targets = torch.tensor([sum(label >= 0 for label in d["labels"]) for d in documents])
mean = (expected.sum() / targets.sum()).item()

# A micro-batch: what the model is given, and for each of its rows the token ids of its documents
def ids(docs): return [d["input_ids"] for d in docs]
def collate(docs, **options): return sft.DataCollatorForLanguageModeling(0, **options)(docs)
def padded(docs): return [(collate(docs), [[row] for row in ids(docs)])]
def flat(docs): return [(transformers.DataCollatorWithFlattening()(docs), [ids(docs)])]
def thirds(docs): return [flat(docs[i::3])[0] for i in range(3)]
def packed(docs, **options):
    for row in sft.pack_dataset(datasets.Dataset.from_list(docs), 2 * max(map(len, ids(docs)))):
        parts = torch.tensor(row["input_ids"]).split(row["seq_lengths"])
        yield collate([row], **options), [[part.tolist() for part in parts]]
def change(**values):
    return lambda docs: [(b | {key: f(b) for key, f in values.items()}, rows) for b, rows in flat(docs)]
WAYS = {
    "each alone": lambda docs: [padded([d])[0] for d in docs if d["input_ids"]],
    "padded, masked": padded,
    "transformers, flattened": flat,
    "the same, use_cache (default)": change(use_cache=lambda b: True),
    "TRL, padding_free": lambda docs: [(collate(docs, padding_free=True), [ids(docs)])],
    "TRL, packed, padding_free": lambda docs: packed(docs, padding_free=True),
    "TRL, packed, position_ids": lambda docs: packed(docs, return_position_ids=True),
    "over 3 micro-batches": thirds,
    "trap: a mean of 3 means": thirds,
    "trap: a mask of ones": change(attention_mask=lambda b: torch.ones_like(b["input_ids"])),
    "trap: no position_ids": change(position_ids=lambda b: None),
    "trap: targets across joins": change(
        labels=lambda b: torch.where(b["position_ids"] == 0, b["input_ids"], b["labels"]))}

def answer(batch): return model(**{"use_cache": False} | batch)     # as TRL's trainer calls it
def document_losses(batches, docs):
    sums = {}
    for batch, rows in batches(docs):
        each = cross_entropy(answer(batch).logits[:, :-1].mT, batch["labels"][:, 1:], reduction="none")
        for losses, row in zip(each, rows):
            for d in row:   # a token's logits predict the label that follows it
                sums[tuple(d)], losses = losses[:len(d)].sum(), losses[len(d):]
    return torch.stack([sums[tuple(d)] for d in ids(docs) if d])

BOUNDS = {"document": 1e-5, "loss": 1e-5, "norm": 1e-4, "neighbour": 0}
print(f"transformers {transformers.__version__}, trl {trl.__version__}, torch {torch.__version__}; {len(documents)} "
      f"documents, {targets.sum()} targets, loss {mean:.6f}\n{'':31}" + "".join(f"{name:>10}" for name in BOUNDS))
for way, batches in WAYS.items():
    ending = ""
    with torch.no_grad():
        losses, with_moved = document_losses(batches, documents), document_losses(batches, moved)
        try: document_losses(batches, [documents[0], {"input_ids": [], "labels": []}])
        except Exception: ending = "; an empty document ends it"
    of_all = {} if "means" in way else {"num_items_in_batch": targets.sum()}
    loss = sum(answer(b | of_all).loss for b, _ in batches(documents)) / (1 if of_all else 3)
    grads = torch.autograd.grad(loss, [*model.parameters()])
    norm = torch.cat([g.flatten() for g in grads]).double().norm().item()
    off = [((losses - expected).abs() / targets.clamp(1)).max().item(), abs(loss.item() / mean - 1),
           abs(norm / kit["grad_norm"] - 1), (losses - with_moved)[1:].abs().max().item()]
    wrong = ", ".join(name for name, x in zip(BOUNDS, off) if not x <= BOUNDS[name])
    print(f"{way:31}" + "".join(f"{x:10.1e}" for x in off) + "  " +
          (f"WRONG: {wrong}" if wrong else "right") + ending)
