#!/usr/bin/env bash
# Chats through data/prepare.py --chat and the trainer: which tokens are trained, held against transformers by
# tests/golden/chat; what is left out; templates that misbehave.
. "$(dirname "$0")/lib.sh"
with_package chat jinja2 || finish
run() { python3 "$root/data/prepare.py" --chat "$@"; }
# tokenize MODEL FILE OUT ARGUMENTS...: all of it for training
tokenize() {
    "$train" --model "$1" --from-scratch --train "$2" --val text.jsonl --out "$3" --overwrite --steps 0 --val-every 0 \
        --num-samples 0 "${@:4}"
}
echo '{"text": "plain"}' > text.jsonl
export -f tokenize
export train
tiny_model bpe 24 40 8 600
cp "$root"/tests/golden/chat/tokenizer*.json bpe
# The targets are those of transformers, except tokens across the boundary: by prepare.py and the trainer, without
# sanitizers, which the smaller files below meet. turns: by rendering prefixes; marked: by {% generation %}.
# SMOLLM2_DIR, the directory of get_model.sh smollm2-135m-instruct: by its tokenizer, too
sanitized=$train train=$release
for form in turns marked; do
    for model in demo bpe ${SMOLLM2_DIR:+"$SMOLLM2_DIR"}; do
        check_python "golden_${model##*/}_$form" "$root/tests/golden/chat" "$root/data/prepare.py" $model $form << 'PY'
import subprocess
golden_dir, prepare, model, form = sys.argv[1:]
golden, compared = json.load(open(golden_dir + "/golden.json")), 0
tokenizer = {"demo": "byte", "bpe": "bpe"}.get(model, "smollm2")
open("samples.jsonl", "w").writelines(json.dumps({"messages": m}) + "\n" for m in golden["samples"])
for name, forms in golden["templates"].items():
    template = forms["marked" if form == "marked" else "plain"]
    if not template or (tokenizer, name) == ("byte", "headers"):
        continue
    open("template.jinja", "w").write(template)
    subprocess.run([sys.executable, prepare, "--chat", "samples.jsonl", "--out", "golden.jsonl", "--chat-template",
                    "template.jinja", *(["--model", model] if model != "demo" else [])], check=True)
    subprocess.run(["bash", "-c", 'tokenize "$0" golden.jsonl golden', model], check=True)
    found = iter(shards.read("golden/tokens"))
    for case in golden["cases"]:
        mask = [int(c == "1" and i not in case["straddling"]) for i, c in enumerate(case["mask"])]
        if (case["tokenizer"], case["template"]) != (tokenizer, name) or not any(mask) or case["sample"] == 2:   # an empty answer
            continue
        wanted, (ids, bits) = (case["ids"], mask), next(found)
        got = (ids[1:-1], bits[1:-1]) if tokenizer == "byte" else (ids, bits)
        if got != wanted:
            sys.exit("%s, sample %d:\n%s\n%s" % (name, case["sample"], wanted, got))
        compared += 1
    assert next(found, None) is None
assert compared >= 9, compared
PY
    done
done
# ---- chats that the trainer reads itself: ids and masks of transformers for the templates of models -------------
check_python chats_are_those_of_transformers "$root/tests/golden/chat" "$train" << 'PY'
import hashlib, shutil, subprocess
golden_dir, trainer = sys.argv[1:]
golden, wrong = json.load(open(golden_dir + "/models.json")), 0
open("chats.jsonl", "w").writelines(json.dumps({"messages": m}) + "\n" for m in golden["samples"])
os.environ.update(SOURCE_DATE_EPOCH=str(golden["day"]), TZ="UTC")
tokenizer = json.load(open("bpe/tokenizer.json"))
for i, name in enumerate(golden["added"], len(tokenizer["model"]["vocab"])):
    tokenizer["added_tokens"].append(dict(tokenizer["added_tokens"][0], id=i, content=name))
for name, model in golden["models"].items():
    demo = name == "chatml"
    if not demo:
        shutil.copytree("bpe", name)
        json.dump(tokenizer, open(name + "/tokenizer.json", "w"))
        if model["tokenizer"] != "bpe":
            shutil.copy("%s/../tokenizers/%s/tokenizer.json" % (golden_dir, model["tokenizer"]), name)
        template = model["template"] or open("%s/templates/%s.jinja" % (golden_dir, name)).read()
        json.dump({"bos_token": model["bos"], "eos_token": model["eos"], "chat_template": template},
                  open(name + "/tokenizer_config.json", "w"))
    subprocess.run(["bash", "-c", 'tokenize "$0" chats.jsonl chats.out', "demo" if demo else name], check=True)
    found = shards.read("chats.out/tokens")
    thinks = name in ("qwen3", "qwen3-first")
    for i, digest in enumerate(model["digests"]):
        if not digest or any(not m["content"] and m["role"] == "assistant" or "reasoning_content" in m and not thinks
                             for m in golden["samples"][i]):
            continue    # left out: refused by the template, an empty answer, thoughts that are not written
        ids, bits = found.pop(0)
        got = [ids[1:-1], bits[1:-1]] if demo else [ids, bits]
        got = json.dumps(got, separators=(",", ":"))
        if hashlib.sha256(got.encode()).hexdigest()[:16] != digest:
            print("%s, chat %d: %s\n%s" % (name, i, golden["samples"][i], got))
            wrong += 1
    assert not found
    if not demo:    # the prompt of an answer
        run = subprocess.run([trainer, "--model", name, "--from-scratch", "--generate", "--chat", "--max-seqlen", "2048",
                              "--sample-tokens", "1", "--prompt", golden["question"]], capture_output=True, text=True)
        if not run.stderr.startswith("%d prompt tokens" % model["asked"]):
            sys.exit("%s: expected %d tokens: %s" % (name, model["asked"], run.stderr))
sys.exit(wrong > 0)
PY
train=$sanitized
python << 'PY'
user, answer = {"role": "user", "content": "Add\n\n1 2"}, {"role": "assistant", "content": "3"}
same = [{"messages": [user, answer]}, {"conversations": [{"from": "human", "value": "Add\n\n1 2"}, {"from": "gpt", "value": "3"}]},
        {"prompt": "Add\n\n1 2", "completion": "3"}, {"prompt": "Add\n\n1 2", "response": "3", "completion": None},
        {"prompt": [user], "completion": [answer]}, {"instruction": "Add", "input": "1 2", "output": "3", "text": "not this"},
        {"instruction": "Add\n\n1 2", "input": "", "output": "3", "id": 1},
        {"messages": [dict(user, content=[{"type": "text", "text": "Add\n"}, {"type": "text", "text": "\n1 2"}]), answer]}]
bad = [{"messages": [user]},
       {"messages": [user, dict(answer, content="a\0b")]}, {"messages": []}, {"messages": "x"}, {"question": "x"},
       {"messages": [user, dict(answer, weight=0)]}, {"prompt": [user, answer], "completion": [user]},
       {"messages": [user, answer], "tools": '[{"name": "add"}]'},
       {"instruction": "Add", "output": "3", "tools": [], "history": [["Hi", "Hello"]]},
       {"prompt": "x", "completions": []}, {"prompt": "x", "completions": ["y", 3]},
       {"instruction": "Add", "input": "1\0 2", "output": "3"}]
one = lambda completion, **more: dict({"prompt": "Add\n\n1 2", "completion": completion}, **more)
apart = [one("9"), one("3", weight=2), one("4", weight=-1), one([answer], weight=2), one("6")]
several = [apart[0], {"prompt": one(0)["prompt"], "completions": ["3", {"completion": "4", "weight": -0.5}, [answer]], "weight": 2}, apart[4]]
many = [{"prompt": "%d?" % i, "completions": [str(k) for k in range(3)]} for i in range(400)]
open("many.jsonl", "w").writelines(json.dumps(r) + "\n" for r in many)
for name, records in ("apart", apart), ("several", several), ("same", same), ("both", [{"text": "plain"}, {"text": "plain", "instruction": "x"}]), ("ends", [{"messages": [user, answer, user]}]), *(("bad%d" % i, [b]) for i, b in enumerate(bad)):
    open(name + ".jsonl", "w").writelines(json.dumps(r) + "\n" for r in records)
PY
check kinds_of_chats tokenize demo same.jsonl same.out
has kinds_are_counted '^records 2 of messages, 1 of conversations, 3 of prompt, 2 of instruction; chats by .* ChatML, .*answers$' out.txt
check apart tokenize demo apart.jsonl apart.out
check several_completions tokenize demo several.jsonl several.out
has records_of_several_are_counted '^records 2 of prompt, 1 of completions; chats by' out.txt
has targets_are_counted '^train .*5 documents, .* 60 of them targets with weights' out.txt
check many_completions "$train" --train many.jsonl --out many.out --steps 0 --val-every 0 --num-samples 0
check_python completions_are_documents_of_one_record << 'PY'
found, alone = shards.read("several.out/tokens"), shards.read("apart.out/tokens")
assert [weights[0] for _, weights in found] == [0, 0, 1, 1, 0] and {w for _, weights in found for w in weights} == {0, 1, 2, -1}
assert [(ids, weights[1:]) for ids, weights in found] == [(ids, weights[1:]) for ids, weights in alone]
for split, least in ("train", 1000), ("val", 3):   # a record is on one side
    marks = [bits[0] for _, bits in shards.read("many.out/tokens", split)]
    assert len(marks) >= least and marks == [0, 1, 1] * (len(marks) // 3), (split, marks)
PY
check on_every_turn tokenize demo same.jsonl all.out --train-on all
check_python all_are_the_same_document << 'PY'
text = b"<|im_start|>user\nAdd\n\n1 2<|im_end|>\n<|im_start|>assistant\n3<|im_end|>"
found, everything = shards.read("same.out/tokens"), shards.read("all.out/tokens")
marked = len(text) - len(b"3<|im_end|>")
assert found == [([256, *text, 10, 257], [0] * (marked + 1) + [1] * 11 + [0, 1])] * 8, found[0]
assert [bits for _, bits in everything] == [[0] + [1] * (len(text) + 2)] * 8, everything[0]
PY
for i in '0 an answer that is trained' '1 without NULs' '2 a list of messages' '3 messages: expected a list, found a string' \
    '4 expected text, messages, .*found question' '5 an answer that is trained' '6 an answer that' '7 none of "tools"' \
    '8 none of "history"' '9 completions: expected a list' '10 completion 2: completion: expected a string or a list, found a number' \
    '11 without NULs'; do
    expect "bad_chat_${i%% *}" 3 "error: bad${i%% *}.jsonl:1: .*${i#* }" tokenize demo "bad${i%% *}.jsonl" refused
done
# ---- the table of keys: what each may hold, and what others mean by them ----------------------------------------
check_python one_table_of_keys "$root" << 'PY'
sys.path.insert(0, sys.argv[1] + "/data")
import prepare
table = open(sys.argv[1] + "/data/texts/records.c").read().split("record_levels[NUM_LEVELS] = {")[1].split("};")[0]
found = {name: "".join(re.findall('"([^"]*)"', keys)).strip() for name, keys in re.findall(r'= \{"(\w+)",(.*?)\},?\n', table, re.S)}
assert found == prepare.KEYS, found
PY
python << 'PY'
user, answer = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
chat = lambda **more: {"messages": [user, dict(answer, **more)]}
call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris", "n": 3}}}
tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"properties": {"name": {"type": "string"}}}}}
task = lambda **more: dict({"instruction": "I", "output": "O"}, **more)
keys = {"list": task(input=[1]), "object": task(system={"a": 1}), "exact": task(input=1e300), "weight": task(weight="1"),
    "call": chat(content=None, tool_calls=[call]), "legacy": chat(content=None, function_call={"name": "f"}), "tools": dict(chat(), tools=[tool]),
    "thoughts": chat(reasoning_content="because"), "name": {"messages": [dict(user, name="bob"), answer]}, "images": dict(chat(), images=["x.png"]),
    "image": {"messages": [dict(user, content=[{"type": "image_url"}, {"type": "text", "text": "Q"}]), answer]}, "empty": chat(content=" \n"),
    "nothing": {"prompt": "Q", "completion": ""}, "role": {"messages": [user, {"role": "bot", "content": "A"}]}, "missing": chat(content=None),
    "untrained": chat(train=False), "train": chat(train="no"), "unwanted": {"prompt": "Q", "completion": "A", "label": False},
    "tag": task(kto_tag="false"), "text": chat(content="", tool_calls=[{"function": dict(call["function"], arguments='{"a": 1}')}])}
for name, record in keys.items():
    open("key_%s.jsonl" % name, "w").write(json.dumps(record) + "\n")
nulls = dict.fromkeys(("text", "parts", "messages", "prompt", "completions", "tools", "weight", "system"))
taken = [task(input=57), task(input=0.25, system=99, label=True), {**nulls, "text": "plain"}, {**nulls, "parts": [["Q", False], ["A", 0.5], ["B", -1]]},
    {"messages": [user, dict(answer, train=False, name=None), user, dict(answer, score=1, id=2)], "source": "web", "score": 3}]
open("taken.jsonl", "w").write("".join("\ufeff%s\n" % json.dumps(r) for r in taken))
heard = [dict(chat(weight=0.5), weight=-2), {"messages": [user, dict(answer, weight=0), user, answer]}, dict(chat(), system="S"),
    {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A", "weight": -1}]}, {"prompt": "Q", "completion": "A", "weight": 0.25}]
open("weights.jsonl", "w").writelines(json.dumps(r) + "\n" for r in heard)
open("called.jsonl", "w").writelines(json.dumps(r) + "\n" for r in (keys["call"], keys["tools"], dict(chat(), tools=json.dumps([tool])), keys["thoughts"]))
open("tools.jinja", "w").write("{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.reasoning_content }}"
    "{{ m.content | trim }}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
PY
while IFS=: read -r name direct prepared; do
    expect "key_$name" 3 "error: key_$name.jsonl:1: .*$direct" tokenize demo "key_$name.jsonl" refused
    expect "prepared_$name" 3 "key_$name.jsonl:1: .*${prepared:-$direct}" run "key_$name.jsonl" --out none.jsonl --strict
done << 'KEYS'
list:input. expected a string or a number, found an array
object:system. expected a string or a number, found an object
exact:input. expected a number of at most 15 digits:a number of more digits
weight:weight. expected a number, found a string
call:none of "tool_calls":tool_calls function name: the template does not render "get_weather"
legacy:none of "function_call":function_call name: the template does not render "f"
tools:none of "tools":tools: the template does not render "get_weather"
thoughts:loses its reasoning_content:the template does not render "because"
name:none of "name":does not render "bob"
images:none of "images"
image:content. expected a text, found a list with image_url
empty:expected an answer, found an empty text
nothing:expected an answer, found an empty text
role:role "bot". expected system:found "bot"
missing:content. expected a text, found none
untrained:an answer that is trained:no message of the assistant to train
train:train. expected true or false, found a string
unwanted:label. expected true
tag:kto_tag. expected true
KEYS
check keys_that_are_taken tokenize demo taken.jsonl taken.out
has unknown_keys_are_named '^unknown keys: source .1., score .2., id .1.$' out.txt
check_python numbers_are_texts_and_null_is_absent << 'PY'
(one, _), (two, _), (three, _), (four, weights), (_, five) = shards.read("taken.out/tokens")
assert b"I\n\n57<" in bytes(one[1:-1]) and b"system\n99<" in bytes(two[1:-1]) and b"I\n\n0.25<" in bytes(two[1:-1])
assert bytes(three[1:-1]) == b"plain" and (four[1:-1], weights) == ([*b"QAB"], [0, 0, 0.5, -1, -1]) and sum(five) == 12
PY
check weights_of_chats tokenize demo weights.jsonl direct.out
check weights_are_prepared run weights.jsonl --out prepared.jsonl
check weights_of_parts tokenize demo prepared.jsonl parts.out
check_python weights_are_carried <<< 'assert shards.read("direct.out/tokens") == shards.read("parts.out/tokens")'
check rendered_calls run called.jsonl --out called.parts.jsonl --chat-template tools.jinja
expect a_call_in_quotes 3 'arguments: the template does not render' run key_text.jsonl --out none.jsonl --strict --chat-template tools.jinja
check all_of_them test "$(wc -l < called.parts.jsonl)" -eq 4
check every_turn_needs_no_answer tokenize demo bad0.jsonl turns.out --train-on all
cp -r bpe foreign
echo '{% for m in messages %}{{ m.content }}{% endfor %}' > foreign/chat_template.jinja
expect an_unknown_template 3 'error: foreign/chat_template.jinja: expected the chat template of .*another' tokenize foreign same.jsonl refused
has the_hint_renders_it '^hint: python3 data/prepare.py --chat FILE --model foreign --out parts.jsonl' out.txt
check texts_need_no_template tokenize foreign both.jsonl text.out
check a_question_may_be_the_last tokenize demo ends.jsonl ends.out
python << 'PY'
chats = [[("user", "Hi"), ("assistant", "Hello \x1b[31m€!")],
         [("system", "S"), ("user", "2+2?"), ("assistant", "4"), ("user", "3+3?"), ("assistant", "6")]]
openai = lambda chat: [{"role": r, "content": c} for r, c in chat]
def put(name, records):
    open(name, "w").writelines(r if isinstance(r, str) else json.dumps(r) + "\n" for r in records)
put("openai.jsonl", [{"messages": openai(c)} for c in chats])
good = {"messages": openai(chats[0])}
put("bad.jsonl", [good, "\n", "{\"messages\": [\n", good, "[1]\n", {"text": "x"}, {"messages": []},
                  {"messages": "x"}, {"messages": [3]}, {"messages": openai(chats[0][:1])}, *[{"prompt": "x"}] * 4, good])
open("latin.jinja", "wb").write(b"\xe9")
templates = {
    "syntax": "{% for %}", "raises": "{{ raise_exception('no chats today') }}",
    "escape": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    # the last answer is rendered otherwise than the ones before it
    "rewrites": "{% for m in messages %}{{ m.role + ':' + ('-' if m.role == 'assistant' and not loop.last else m.content) + '\n' }}"
                "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}",
    # a block in a macro: its text is not where it is rendered
    "macro": "{% macro turn(m) %}<{% generation %}{{ m.content }}{% endgeneration %}>{% endmacro %}"
             "{% for m in messages %}{{ m.role }}{{ turn(m) if m.role == 'assistant' else m.content }}{% endfor %}",
    "today": "{{ strftime_now('%Y-%m-%d') }}{% for m in messages %}{{ m | tojson }}"
             "{% if loop.index > 8 %}{% break %}{% endif %}{% endfor %}",
}
for name, text in templates.items():
    open(name + ".jinja", "w").write(text)
PY
shown() { same "shown_$1" <(run --show 9 "$1" | grep -v -e '^$' -e '^<|im_start|>') "$2"; }      # shown FILE AS
printf '%s\n' 'Hi<|im_end|>' '[[Hello \x1b[31m€!<|im_end|>]]' 'S<|im_end|>' '2+2?<|im_end|>' '[[4<|im_end|>]]' \
    '3+3?<|im_end|>' '[[6<|im_end|>]]' > wanted
shown openai.jsonl wanted
for _ in $(seq 8); do printf '%s\n' Add '1 2<|im_end|>' '[[3<|im_end|>]]'; done > eight
shown same.jsonl eight
check macro eval "run openai.jsonl --chat-template macro.jinja --show 2 | grep -F 'user2+2?assistant<[[4]]>user'"
check same_day eval "SOURCE_DATE_EPOCH=86400 TZ=UTC run openai.jsonl --chat-template today.jinja --show 1 |
    grep '1970-01-02{\"role\": \"user\", \"content\": \"Hi\"}'"
check bad_lines run bad.jsonl --out good.jsonl
for line in '3: expected JSON' '5: expected an object, found an array' '6: expected messages.* found text' \
    '7: expected a list' '8: messages: expected a list' '9: message 1: expected an object, found a number' \
    '10: no message of the assistant'; do
    has "bad_line_${line%%:*}" "^warning: left out: bad.jsonl:$line" out.txt
done
has bad_lines_are_counted '^warning: 11 records left out in all' out.txt
check good_lines test "$(wc -l < good.jsonl)" -eq 3
check rewriting run openai.jsonl --chat-template rewrites.jinja --out r.jsonl
has rewriting_is_left_out 'left out: openai.jsonl:2: message 3: the template renders it and later' out.txt
expect strict 3 'bad.jsonl:3: expected JSON' run bad.jsonl --strict --out none.jsonl
echo '{"prompt": "Q", "chosen": "A", "rejected": "B"}' > pairs.jsonl
expect pairs_are_no_parts 3 'error: pairs.jsonl: expected documents, found none' run pairs.jsonl --out none.jsonl
has who_renders_pairs '^hint: left out: pairs.jsonl:1: expected a chat, found chosen and rejected: leave --chat out' out.txt
while read -r template pattern; do
    expect "template_$template" 3 "$pattern" run openai.jsonl --chat-template $template.jinja --strict --out none.jsonl
done << 'TEMPLATES'
absent absent.jinja: expected text in UTF-8
latin latin.jinja: expected text in UTF-8
syntax syntax.jinja: expected a chat template
raises no chats today
escape unsafe
TEMPLATES
# what ends trained turns ends texts, too: of the model's template, and of rendered parts
cp -r bpe base && edit base/config.json 'j["eos_token_id"] = 0' && echo '{"eos_token_id": 0, "temperature": 0.5}' > base/generation_config.json
echo '{"parts": [["<|im_start|>user\nq<|im_end|>\n", false], ["a<|im_end|>\n", true]]}' > parts.jsonl
echo '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}' > messages.jsonl
chatml='{% for message in messages %}{{"<|im_start|>" + message["role"] + "\n" + message["content"] + "<|im_end|>" + "\n"}}{% endfor %}{% if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}{% endif %}'
for form in parts messages; do
    [ $form = parts ] || printf %s "${chatml//\"/\'}" > base/chat_template.jinja
    expect ${form}_end_texts 0 '^turns end with <.im_end.>, which ends texts' "$train" --model base --from-scratch --train $form.jsonl \
        --val text.jsonl --steps 1 --num-samples 0 --val-every 0 --max-seqlen 64 --micro-batch-tokens 256 --out end.$form
    check_python ${form}_end_texts_in_final $form <<< 'c, g = (json.load(open("end.%s/final/%s.json" % (sys.argv[1], n))) for n in ("config", "generation_config"))
assert c["eos_token_id"] == 0 and g == {"eos_token_id": [0, 2], "temperature": 0.5}, g'
done
same the_template_goes_along base/chat_template.jinja end.messages/final/chat_template.jinja
expect no_template_of_a_model 3 'expected a chat template, found none' run openai.jsonl --model bpe --out none.jsonl
mkdir stub && echo 'raise ImportError' > stub/jinja2.py
PYTHONPATH=$work/stub expect without_jinja2 2 'the Python package jinja2 is not installed' run openai.jsonl --out none.jsonl
check nothing_is_written test -z "$(ls | grep none)"
finish
