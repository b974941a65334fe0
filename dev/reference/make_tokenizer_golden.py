#!/usr/bin/env python3
"""Makes tests/golden/tokenizers: small byte-level BPE tokenizers, cut as SmolLM2's, Llama 3's and
Qwen's (which normalizes too), three of characters, as Llama 2's, Mistral 7B's and with every option,
and what Hugging Face's tokenizers make of texts that are hard to cut, and of the ids again.

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
    t.normalizer, t.pre_tokenizer = normalizer, pre
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=400, special_tokens=specials, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    t.add_tokens([AddedToken("<|im_start|>", normalized=False, special=True)])
    return t


# white space around added tokens, parts of words, tokens in tokens, what normalization makes of them
ADDED_TEXTS = [
    "<s>", "<s>a</s>", " <s> a </s> ", "<s>[INST] hi [/INST] ho </s><s>[INST]  hi[/INST]", "a<unk>b", "\u2581a \u2581\u2581b",
    "\ufffd\u2581", "<0x0A>", "\U00020000\U00020001a\U00020002", "a  <both>  b", "a\n<left> b <left>c", "\u3000\t<right>\u2028\u00a0<right> b",
    "a <both> <both> b", "<right> \u2003<left>", "word", "a word.", "words sword", "\u00e9word word\u0301 word\u200d word_", "1word\u0663",
    "e\u0301<", "x e\u0301<e\u0301<y", "norm", "a norm", "anorm norm norms", "<s>norm", "<right>norm", "\n", "<right> \u0085word",
    "the~~theory~~~of", "a\tb\t\t\tc", "12 345", "a\u0301\u0328\u2581", "\x07", "<both>\u2581<both>", "~~", " ~~", "\t \t", "<right>\n\n\n",
    "<left><left>", " <left> <left> ", "<b", "<both", "wordword", "word word", "~~norm", "\tnorm",
]
BYTES = ["<0x%02X>" % i for i in range(256)]


def characters(words, normalizer, pre, added=(), bytes_of=BYTES, **options):
    """As SentencePiece's: trained with words cut by a pre_tokenizer, which is then replaced."""
    ends = ["<unk>", "<s>", "</s>"]
    t = Tokenizer(models.BPE(unk_token="<unk>", **options))
    t.normalizer, t.pre_tokenizer = normalizer, words
    t.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=900, special_tokens=ends + bytes_of, limit_alphabet=120, show_progress=False))
    tree = json.loads(t.to_str())
    tree["added_tokens"] = [x for x in tree["added_tokens"] if x["content"] in ends]
    model, made = tree["model"], dict.fromkeys("".join(merge) for merge in tree["model"]["merges"])
    if not model["ignore_merges"]:  # all pairs that make a token, as of SentencePiece's scores
        model["merges"] = [(x[:i], x[i:]) for x in made for i in range(1, len(x)) if {x[:i], x[i:]} <= model["vocab"].keys()]
    t = Tokenizer.from_str(json.dumps(tree))
    t.pre_tokenizer = pre
    t.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                                   decoders.Strip(" ", 1, 0)])
    t.add_tokens(list(added))
    return t


def save(name, t, texts=TEXTS):
    folder = OUT / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(
        json.dumps(json.loads(t.to_str()), ensure_ascii=False, separators=(",", ":")) + "\n")
    cases = [{"text": x, "ids": t.encode(x, add_special_tokens=False).ids} for x in texts]
    for case in cases if name in CHARACTERS else ():
        case["decoded"] = t.decode(case["ids"], skip_special_tokens=False)
    lines = ",\n".join(json.dumps(c, ensure_ascii=True) for c in cases)
    (folder / "cases.json").write_text("[\n" + lines + "\n]\n")
    print(name, t.get_vocab_size(), "tokens,", sum(len(c["ids"]) for c in cases), "ids")


CHARACTERS = ("llama2", "mistral", "options")
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
METASPACE = pre_tokenizers.Metaspace
ALL_TEXTS = TEXTS + NFC_TEXTS + ADDED_TEXTS
save("llama2", characters(METASPACE(), normalizers.Sequence([
    normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]), None, fuse_unk=True, byte_fallback=True), ALL_TEXTS)
save("mistral", characters(METASPACE(), None, METASPACE(prepend_scheme="first", split=False), [
    AddedToken(x, normalized=False, special=True) for x in ("[INST]", "[/INST]")], fuse_unk=True, byte_fallback=True), ALL_TEXTS)
save("options", characters(METASPACE(split=False), normalizers.Sequence([
    normalizers.NFC(), normalizers.Replace("~~", "\u2581"), normalizers.Replace(Regex(r"\t+"), "<\u2581"),
    normalizers.Prepend("<\u2581")]), pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), METASPACE(prepend_scheme="always", split=True)]), [
    AddedToken("<left>", lstrip=True, normalized=False), AddedToken("<right>", rstrip=True, normalized=False),
    AddedToken("<both>", lstrip=True, rstrip=True, normalized=True), AddedToken("word", single_word=True, normalized=False),
    AddedToken("e\u0301<", normalized=True), AddedToken("norm", normalized=True), AddedToken("\n", rstrip=True, normalized=False)],
    BYTES[:0xe3], ignore_merges=True, byte_fallback=True), ALL_TEXTS)
