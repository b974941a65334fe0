#!/usr/bin/env python3
"""Makes chats about the meanings of words, from WordNet's files, as JSONL.

WORDNET is a directory with index.noun, data.noun and so on (Debian: wordnet-base,
/usr/share/wordnet). There is one chat per word: its meanings, and an example of its use if there is
one. The words are those that WordNet's authors counted in texts, in a fixed random order. The text
is WordNet's, under the WordNet licence.
"""
import itertools
import json
import os
import random
import re

from command import BAD_INPUT, Parser, fail, run_main, write

PARTS = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}
MAX_WORDS, MAX_MEANINGS = 4000, 8


def meanings(directory):
    """{word: [(part of speech, offset into its data file)]}"""
    words = {}
    for part in PARTS:
        with open(os.path.join(directory, "index." + part), encoding="utf-8") as f:
            for fields in (line.split() for line in f if not line.startswith(" ")):  # the licence
                senses, counted = int(fields[2]), int(fields[5 + int(fields[3])])
                if counted and fields[0].isalpha():
                    offsets = fields[-senses:][:counted]
                    words.setdefault(fields[0], []).extend((part, int(o)) for o in offsets)
    return words


def chat(word, places, files):
    texts = []  # of the user and of the assistant by turns
    for part, offset in places[:MAX_MEANINGS]:
        files[part].seek(offset)
        gloss = files[part].readline().decode("utf-8").split(" | ", 1)[1].strip()
        definition = re.split(r';\s*"', gloss)[0].strip().rstrip(";")
        texts += ["What else does it mean?" if texts else f"What does {word} mean?",
                  f"{word} ({PARTS[part]}): {definition}."]
        examples = [e for e in re.findall(r'"([^"]+)"', gloss)
                    if word in e.split() and len(e.split()) > 2]
        for e in examples[:1]:
            texts += ["Use it in a sentence.",
                      e[0].upper() + e[1:] + ("" if e[-1] in ".!?" else ".")]
    roles = itertools.cycle(("user", "assistant"))
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts)]}


def main():
    parser = Parser()
    parser.add_argument("wordnet")
    parser.add_argument("out")
    parser.add_argument("--leave-out", default="", help="words held out for questions")
    args = parser.parse_args()
    try:
        words = meanings(args.wordnet)
        files = {p: open(os.path.join(args.wordnet, "data." + p), "rb") for p in PARTS}
    except OSError as e:
        fail(BAD_INPUT, f"{e.filename}: expected WordNet's files, found: {e.strerror}",
             "apt-get install wordnet-base, and give /usr/share/wordnet")
    chosen = sorted(set(words) - set(args.leave_out.split(",")))
    random.Random(1).shuffle(chosen)
    lines = (json.dumps(chat(word, words[word], files)) + "\n" for word in chosen[:MAX_WORDS])
    print("wrote %s: %d chats" % (args.out, write(args.out, lines)))


if __name__ == "__main__":
    run_main(main)
