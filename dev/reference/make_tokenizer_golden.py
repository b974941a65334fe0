#!/usr/bin/env python3
"""Makes tests/golden/tokenizers: small byte-level BPE tokenizers, cut as SmolLM2's, Llama 3's and
Qwen's (which normalizes too), and what Hugging Face's tokenizers make of texts that are hard to cut.

    pip install tokenizers==0.22.2
    python3 dev/reference/make_tokenizer_golden.py
"""
import json
import pathlib
import random

from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers,
                        trainers)

ROOT = pathlib.Path(__file__).resolve().parents[2]
OUT = ROOT / "tests" / "golden" / "tokenizers"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN = LLAMA3.replace("{1,3}", "")  # a digit is a word
TEXTS = [
    "", " ", "  ", "\n", "a", " a", "Hello, world!", "It's, we'll, THEY'RE, I'd  've", "don't'd's",
    "1", "12", "123", "1234567 8.90e-10", "x1y22z333", "  leading", "trailing  ", "a  b   c    d",
    "tab\tand\r\nlines\n\n\n  indented\n\tdef f(x):\n        return x**2 + 0x1F\n",
    "naïve café, Ærøskøbing, Straße", "Привет, мир! 42", "東京都と大阪府", "مرحبا بالعالم ١٢٣", "½ ² Ⅷ ௧௨",
    "emoji 🙂🙂 👩‍👩‍👧 e\u0301", "\u00a0nbsp\u2003em\u3000wide\u200bzero", "-- ... !!! ??? (([[{{}}]]))",
    "<|endoftext|>", "a<|endoftext|>b<|endoftext|><|endoftext|>", "<|endoftext", "<|im_start|>user\nhi",
    "int main(void) { return 0; }  // the end", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "the the the theory",
    "\x01\x7f control", "mixed кириллица and 日本語 and 1st, 2nd",
]
# composed, decomposed, in another order, singletons, excluded from composition, Hangul
NFC_TEXTS = [
    "e\u0301 \u00e9 E\u0301E\u0300", "\u212b A\u030a \u2126 \uf900", "a\u0301\u0328 a\u0328\u0301 q\u0307\u0323",
    "\u1100\u1161\u11a8 \u1112\u1161\u11ab\u1100\u1173\u11af \uac01", "\u0958 \u0915\u093c \u0344 \u1e9b\u0323",
    "\u0301first", "<|endoftext|>\u0301e\u0301<|im_start|>\u0338", "cafe\u0301 na\u00efve re\u0301sume\u0301 1\u0301",
    "\U0001d15e \U00011131\U00011127", "A\u030a\u0301\u0301 " * 8,
]


def corpus():
    words = "the theory of packing documents once into one buffer that is never padded again".split()
    rng = random.Random(1)
    for _ in range(400):
        yield " ".join(rng.choice(words) for _ in range(12)) + rng.choice([".", "!\n", "\n\n", " 1234"])
    for text in TEXTS[::2]:  # the other half is new to the tokenizer
        yield text.replace("<|endoftext|>", "")


def tokenizer(pre, specials, ignore_merges, normalizer=None):
    t = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if normalizer:
        t.normalizer = normalizer
    t.pre_tokenizer = pre
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=400, special_tokens=specials, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    t.add_tokens([AddedToken("<|im_start|>", normalized=False, special=True)])
    return t


def save(name, t, texts=TEXTS):
    folder = OUT / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(
        json.dumps(json.loads(t.to_str()), ensure_ascii=False, separators=(",", ":")) + "\n")
    cases = [{"text": x, "ids": t.encode(x, add_special_tokens=False).ids} for x in texts]
    lines = ",\n".join(json.dumps(c, ensure_ascii=True) for c in cases)
    (folder / "cases.json").write_text("[\n" + lines + "\n]\n")
    print(name, t.get_vocab_size(), "tokens,", sum(len(c["ids"]) for c in cases), "ids")


save("smollm2", tokenizer(pre_tokenizers.Sequence([
    pre_tokenizers.Digits(individual_digits=True),
    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]), ["<|endoftext|>"], False))
save("llama3", tokenizer(pre_tokenizers.Sequence([
    pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]), ["<|endoftext|>"], True))
save("qwen", tokenizer(pre_tokenizers.Sequence([
    pre_tokenizers.Split(Regex(QWEN), "isolated"),
    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]), ["<|endoftext|>"], False,
    normalizers.NFC()), TEXTS + NFC_TEXTS)
