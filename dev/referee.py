#!/usr/bin/env python3
"""Does another trainer's packing change the result? Holds transformers and TRL to a kit of ours.

    ./train_llama --model DIR --train DATA --check-packing=kit.json
    dev/referee.py kit.json DIR

Documents, among them one of one token and one that is masked whole, must have the loss that they
have alone, the step its loss and gradient norm, also over micro-batches, and no loss may change when
a token of another document does. fp32 on the CPU. Needs torch, transformers, trl and datasets.
"""
import copy, json, sys, torch, transformers, trl, datasets
from torch.nn.functional import cross_entropy
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

kit = json.load(open(sys.argv[1]))
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.float32)
spans = zip([0] + kit["document_ends"], kit["document_ends"])
documents = [{key: kit[key][a:b] for key in ("input_ids", "labels")} for a, b in spans]
documents += [{"input_ids": [5, 6, 7][:n], "labels": [-100] * n} for n in (1, 3)]
expected = torch.tensor(kit["loss_sums"] + [0.0, 0.0])
targets = torch.tensor([sum(label >= 0 for label in d["labels"]) for d in documents])

NO_CACHE = {"use_cache": False}     # as TRL's trainer calls the model
datasets.disable_progress_bars()
transformers.logging.set_verbosity_error()

# A micro-batch: what the model is given, and for each of its rows the token ids of its documents
def ids(docs): return [d["input_ids"] for d in docs]
def collate(docs, **options): return DataCollatorForLanguageModeling(0, **options)(docs)
def padded(docs): return [(collate(docs), [[row] for row in ids(docs)])]
def alone(docs): return [padded([d])[0] for d in docs if d["input_ids"]]
def free(docs): return [(collate(docs, padding_free=True), [ids(docs)])]
def flat(docs): return [(transformers.DataCollatorWithFlattening()(docs), [ids(docs)])]
def thirds(docs): return [flat(docs[i::3])[0] for i in range(3)]
def packed(docs, **options):
    for row in trl.pack_dataset(datasets.Dataset.from_list(docs), 2 * max(map(len, ids(docs)))):
        parts = torch.tensor(row["input_ids"]).split(row["seq_lengths"])
        yield collate([row], **options), [[part.tolist() for part in parts]]
def change(key, value):
    return lambda docs: [(b | {key: value(b)}, rows) for b, rows in flat(docs)]

WAYS = {
    "each alone": alone,
    "padded, masked": padded,
    "transformers, flattened": flat,
    "the same, use_cache (default)": change("use_cache", lambda b: True),
    "TRL, padding_free": free,
    "TRL, packed, padding_free": lambda docs: packed(docs, padding_free=True),
    "TRL, packed, position_ids": lambda docs: packed(docs, return_position_ids=True),
    "over 3 micro-batches": thirds,
    "trap: a mean of 3 means": thirds,
    "trap: a mask of ones": change("attention_mask", lambda b: torch.ones_like(b["input_ids"])),
    "trap: no position_ids": change("position_ids", lambda b: None),
    "trap: targets across joins": change(
        "labels", lambda b: torch.where(b["position_ids"] == 0, b["input_ids"], b["labels"])),
}

def document_losses(way, docs):
    sums = {}
    for batch, rows in WAYS[way](docs):
        logits = model(**NO_CACHE | batch).logits
        each = cross_entropy(logits[:, :-1].mT, batch["labels"][:, 1:], reduction="none")
        for losses, row in zip(each, rows):
            for d in row:   # a token's logits predict the label that follows it
                sums[tuple(d)], losses = losses[:len(d)].sum(), losses[len(d):]
    return torch.stack([sums[tuple(d)] for d in ids(docs) if d])

def step(way):
    model.zero_grad()
    batches = list(WAYS[way](documents))
    share = {"num_items_in_batch": None if "means" in way else targets.sum()}
    loss = sum(model(**NO_CACHE | b | share).loss for b, _ in batches)
    if "means" in way: loss = loss / len(batches)
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()]).double().norm().item()

def refuses_an_empty_document(way):
    try: document_losses(way, [documents[0], {"input_ids": [], "labels": []}])
    except Exception: return "; an empty document ends it"
    return ""

moved = copy.deepcopy(documents)
moved[0]["input_ids"][1] ^= 1
mean = (expected.sum() / targets.sum()).item()
print(f"transformers {transformers.__version__}, trl {trl.__version__}, torch {torch.__version__}; "
      f"{len(documents)} documents, {targets.sum()} targets, loss {mean:.6f}\n{'':31}"
      "  document      loss      norm neighbour")
for way in WAYS:
    with torch.no_grad():
        losses, with_moved = document_losses(way, documents), document_losses(way, moved)
        empty = refuses_an_empty_document(way)
    loss, norm = step(way)
    off = {"document": ((losses - expected).abs() / targets.clamp(1)).max().item(),
           "loss": abs(loss / mean - 1), "norm": abs(norm / kit["grad_norm"] - 1),
           "neighbour": (losses - with_moved)[1:].abs().max().item()}
    bounds = {"document": 1e-5, "loss": 1e-5, "norm": 1e-4, "neighbour": 0}
    wrong = [name for name, x in off.items() if not x <= bounds[name]]
    print(f"{way:31}" + "".join(f"{x:10.1e}" for x in off.values()) + "  " + (
        "WRONG: " + ", ".join(wrong) if wrong else "right") + empty)
