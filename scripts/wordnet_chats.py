#!/usr/bin/env python3
"""Chats about the meanings of words, from WordNet's files, as JSONL for prepare.py --chat.

usage: wordnet_chats.py WORDNET OUT.jsonl [--words N] [--leave-out WORD,WORD...]

WORDNET is a directory with index.noun, data.noun and so on (Debian: wordnet-base,
/usr/share/wordnet). One chat a word: its first meaning, then a question for each further one, and
an example of its use where there is one. Words are those that WordNet's authors counted in texts,
in a fixed random order. The text is WordNet's, under the WordNet licence.
"""
import argparse
import json
import os
import random
import re
import sys

PARTS = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}
MAX_MEANINGS = 8


def meanings(directory):
    """{word: [(how often it was counted, part of speech, offset into its data file)]}"""
    words = {}
    for part in PARTS:
        with open(os.path.join(directory, "index." + part), encoding="utf-8") as f:
            for line in f:
                if line.startswith(" "):
                    continue  # the licence
                fields = line.split()
                senses, counted = int(fields[2]), int(fields[5 + int(fields[3])])
                if counted and fields[0].isalpha():
                    offsets = fields[-senses:][:counted]
                    words.setdefault(fields[0], []).extend((part, int(o)) for o in offsets)
    return words


def read_gloss(file, offset, word):
    """The definition of a set of synonyms, and the examples that use this one."""
    file.seek(offset)
    gloss = file.readline().decode("utf-8").split(" | ", 1)[1].strip()
    definition = re.split(r';\s*"', gloss)[0].strip().rstrip(";")
    examples = re.findall(r'"([^"]+)"', gloss)
    return definition, [e for e in examples if word in e.split() and len(e.split()) > 2]


def chat(word, places, files):
    messages = []

    def turn(question, answer):
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})

    for i, (part, offset) in enumerate(places[:MAX_MEANINGS]):
        definition, examples = read_gloss(files[part], offset, word)
        turn("What does %s mean?" % word if i == 0 else "What else does it mean?",
             "%s (%s): %s." % (word, PARTS[part], definition))
        if examples:
            text = examples[0]
            turn("Use it in a sentence.", text[0].upper() + text[1:] + ("" if text[-1] in ".!?" else "."))
    return {"messages": messages}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("wordnet")
    parser.add_argument("out")
    parser.add_argument("--words", type=int, default=4000)
    parser.add_argument("--leave-out", default="", help="words that are kept for questions")
    args = parser.parse_args()
    try:
        words = meanings(args.wordnet)
        files = {p: open(os.path.join(args.wordnet, "data." + p), "rb") for p in PARTS}
    except OSError as e:
        print("error: %s: expected WordNet's files, found: %s" % (e.filename, e.strerror),
              "hint: apt-get install wordnet-base, and give /usr/share/wordnet", sep="\n",
              file=sys.stderr)
        return 3
    chosen = sorted(set(words) - set(args.leave_out.split(",")))
    random.Random(1).shuffle(chosen)
    with open(args.out + ".partial", "w", encoding="utf-8") as out:
        for word in chosen[:args.words]:
            out.write(json.dumps(chat(word, words[word], files)) + "\n")
    os.replace(args.out + ".partial", args.out)
    print("wrote %s: %d chats" % (args.out, len(chosen[:args.words])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
