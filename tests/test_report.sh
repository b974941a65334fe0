#!/usr/bin/env bash
# Where people look at a run: report.html, TensorBoard and W&B followed live, several runs in one plot.
. "$(dirname "$0")/lib.sh"
scratch report
train=${TRAIN:-$root/build/asan/train_llama}
scripts=$root/scripts

# ---- a real run, resumed: the log has its samples ------------------------------------------------------
tiny_model model 24 40 8
uneven_texts texts 30
prepare texts --out shards --val-frac 0.1
small=("$train" --train shards --val-tokens 200 --max-seqlen 64 --micro-batch-tokens 128
       --num-samples 2 --sample-tokens 5 --prompt 'line ' --out real)
check a_run "${small[@]}" --model model --from-scratch --steps 4 --sample-every 2
outcome continued 0 '^step +5/6' "$train" --resume --out real --steps 6
lacks no_sample_is_lost_by_a_resume 'warning' out.txt
samples_in_the_log() {
    python3 -c 'import json
r = [json.loads(line) for line in open("real/log.jsonl")]
s = [(e["step"], e["number"]) for e in r if e.get("event") == "sample" and e["text"].startswith("line ")]
assert s == [(k, n) for k in (2, 4, 6) for n in (1, 2)], s'
}
check samples_are_in_the_log samples_in_the_log
check report_of_a_real_run python3 "$scripts/report.py" real
read -r docs mean < <(python3 -c 'import json
train = json.loads(open("real/log.jsonl").readline())["data"]["train"]
print(train["documents"], round(train["tokens"] / train["documents"]))')
has document_lengths ">Document lengths<.*<rect .*>$docs documents, mean $mean tokens" real/report.html
has page_has_samples '<pre>line ' real/report.html
lacks nothing_is_left_out 'None in the log|no records' real/report.html

# tokens that a run has made of texts are found beside its log, from anywhere
check a_run_on_texts "$train" --model demo --train texts --out words --max-seqlen 64 --micro-batch-tokens 128 \
    --steps 1 --num-samples 0 --val-every 0
check report_of_a_run_on_texts sh -c 'cd / && python3 "$1" "$2"' sh "$scripts/report.py" "$work/words"
has document_lengths_of_texts '>Document lengths<.*<rect ' words/report.html

# ---- a log with everything: ranks, a resume, spikes, bad lines, hostile text ------------------------------
cat > log.py <<'PY'
import json, sys
def step(s, loss=None, **more):
    return dict({"step": s, "loss": 5.0 - s / 100 if loss is None else loss, "grad_norm": 1.5,
                 "lr": 1e-3, "ms": 500.0, "read_ms": 1.0, "passes_ms": 400.0, "tokens_per_s": 2000.0 + s, "real_tokens": 1000, "targets": 990,
                 "fill": 0.9, "docs": 7, "longest_doc": 64, "attention_pairs": 20, "padded_pairs": 100,
                 "skipped": False, "spike": False}, **more)
def start(event, s):
    return {"event": event, "version": "1", "device": "<cpu>", "step": s, "parameters": 12345,
            "data": {"train": {"documents": 77777}, "val": None},
            "options": {"model": "m", "train": "gone", "steps": 40, "lr": 0.125, "max-seqlen": 64}}
def nan(record, *keys): return dict(record, **dict.fromkeys(keys))
if __name__ == "__main__":
    first = [start("start", 0)] + [step(s) for s in range(1, 21)]
    again = [start("resume", 10)] + [
        step(s, 4.0 - s / 100, imbalance_measured=1.25, slowest_rank=1) for s in range(11, 31)]
    again[3] = dict(again[3], spike=True, loss=987.5)
    again[5] = dict(nan(again[5], "loss", "grad_norm"), skipped=True)
    again.append({"event": "sample", "step": 30, "number": 1, "ended": True,
                  "text": "<script>alert(1)</script> http://example.com &"})
    lines = [json.dumps(r) for r in first + again]
    lines[3:3] = ["garbage", '{"step": 3}', "[1]"]      # lines 4 to 6
    open(sys.argv[1], "w").write("\n".join(lines) + '\n{"step": 31, "lo')
PY
mkdir odd && python3 log.py odd/log.jsonl
outcome report 0 '^wrote odd/report.html: 30 steps$' python3 "$scripts/report.py" odd
has bad_lines_are_named '^warning: odd/log.jsonl: .*: line 4, 5, 6$' out.txt
check_python page "$scripts" <<'PY'
import re, sys
from html.parser import HTMLParser
page = open("odd/report.html", encoding="utf-8").read()
class Parser(HTMLParser):
    open_tags, text = [], ""
    def handle_starttag(self, tag, attributes):
        assert tag not in ("script", "link", "img", "iframe"), tag
        assert not {"src", "href", "onload"} & {name for name, _ in attributes}, attributes
        if tag not in ("meta", "br", "path", "circle", "rect"): self.open_tags.append(tag)
    def handle_endtag(self, tag): assert self.open_tags.pop() == tag, tag
    def handle_startendtag(self, tag, attributes): pass
    def handle_data(self, data): self.text += data + "|"
parser = Parser()
parser.feed(page)
assert parser.open_tags == [], parser.open_tags
for fact in ("30 of 40 so far", "3.7000", "30,000", "0:15", "12,345", "<cpu>", "resumed after step|10",
             "4, 5, 6", "documents 77,777", "step 13", "SPIKE: loss 987.5000", "0.125",
             "SKIPPED: loss not finite", "<script>alert(1)</script> http://example.com &",
             "Busiest rank", "No .idx file of --train gone", "500.0 ms, longest 500.0 ms", "waiting for data|1.0 ms, 0.20 % of all",
             "forward and backward|400.0 ms, 80.00 % of all", "the rest|99.0 ms, 19.80 % of all", "90.0 %"):
    assert fact in parser.text, fact
assert "url(" not in page and "@import" not in page and "nan" not in page
# contrast by WCAG: text 4.5, lines and bars 3, in both schemes
def luminance(colour):
    parts = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), parts))
schemes = [dict(re.findall(r"--(\w+): (#\w{6})", block)) for block in re.findall(r":root {[^}]*}", page)]
assert len(schemes) == 2
for scheme in schemes:
    for name, least in dict(text=4.5, muted=4.5, one=3, two=3, faint=3).items():
        a, b = sorted((luminance(scheme[name]), luminance(scheme["back"])))
        assert (b + 0.05) / (a + 0.05) >= least, (name, scheme)
PY
mkdir one && head -n 2 real/log.jsonl > one/log.jsonl && grep -m 1 '^{"step"' real/log.jsonl >> one/log.jsonl
check report_after_one_step python3 "$scripts/report.py" one
mkdir none && head -n 1 real/log.jsonl > none/log.jsonl
expect report_before_the_first_step 3 'expected at least one step' python3 "$scripts/report.py" none
expect report_of_nothing 3 'cannot read' python3 "$scripts/report.py" nothing
if [ "$(id -u)" -ne 0 ]; then
    expect report_not_writable 4 'cannot write' python3 "$scripts/report.py" odd --out /proc/report.html
else expect report_not_writable 4 'cannot write' python3 "$scripts/report.py" odd --out missing/r.html; fi

# ---- followed live; a stand-in for wandb writes down what it is given --------------------------------------
mkdir stand_in live
cat > stand_in/wandb.py <<'PY'
class Run:
    def log(self, values, step): print("log", step, sorted(values.items()), flush=True)
    def finish(self): print("finish", flush=True)
def init(**what):
    print("init", what["project"], what["name"], what["config"]["steps"], flush=True)
    return Run()
PY
follow() { PYTHONPATH=stand_in exec timeout "$limit_s" python3 -u "$scripts/follow_run.py" "$@"; }
follow live --wandb project > followed.txt 2>&1 & pid=$!
lines_of() { python3 -c 'import json, log; print("\n".join(json.dumps(r) for r in '"$1"'))'; }
lines_of '[log.start("start", 0), log.step(1), log.step(2), {"event": "val", "step": 2, "loss": 4.5}]' \
    > live/log.jsonl
check follows await_line $pid '^copied .* step 2$' followed.txt
has w_and_b_run '^init project live 40$' followed.txt
has w_and_b_step "^log 1 .*'train/loss', 4.99" followed.txt
has w_and_b_validation "^log 2 \[\('val/loss', 4.5\)\]" followed.txt
lines_of '[log.step(3)]' | tr -d '\n' | head -c 30 >> live/log.jsonl
lines_of '[log.step(3)]' | tail -c +31 > rest
cat rest >> live/log.jsonl
check follows_whole_lines await_line $pid '^copied .* step 3$' followed.txt
# as the trainer does: cut to step 1, then more than there was
python3 -c 'lines = open("live/log.jsonl").readlines()
open("live/log.jsonl", "r+").truncate(sum(map(len, lines[:2])))'
lines_of '[log.start("resume", 1)] + [log.step(s, 2.5) for s in (2, 3, 4)]' >> live/log.jsonl
check follows_a_resumed_run await_line $pid '^copied .* step 4$' followed.txt
kill $pid && wait $pid 2> /dev/null
check_python a_cut_log_begins_another_run <<'PY'
lines = open("followed.txt").read().split("finish\n")
assert len(lines) == 2, lines
steps = [line.split()[1] for line in lines[1].splitlines() if line.startswith("log")]
assert steps == ["1", "2", "3", "4"] and "4.98" not in lines[1], lines[1]
PY
outcome follow_names_bad_lines 0 '^warning: odd/log.jsonl: line 5 is not a record$' \
    env PYTHONPATH=stand_in python3 "$scripts/follow_run.py" odd --wandb p --once
lacks half_a_line_waits 'line 4[0-9]' out.txt
expect follow_without_a_run 3 'expected the --out directory' python3 "$scripts/follow_run.py" nothing --once
mkdir no_package && echo 'raise ImportError' | tee no_package/wandb.py > no_package/tensorboard.py
expect no_wandb 2 'wandb is not installed' env PYTHONPATH=no_package \
    python3 "$scripts/follow_run.py" odd --wandb p --once
expect no_tensorboard 2 'tensorboard is not installed' env PYTHONPATH=no_package \
    python3 "$scripts/follow_run.py" odd --once
if python3 -c 'import tensorboard' 2> /dev/null; then
    mkdir events && python3 log.py events/log.jsonl
    head -n 23 events/log.jsonl > whole && mv events/log.jsonl later && mv whole events/log.jsonl
    check tensorboard_first python3 "$scripts/follow_run.py" events --once
    mv later events/log.jsonl
    check tensorboard_again python3 "$scripts/follow_run.py" events --once
    check_python tensorboard_reads_it <<'PY'
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator("events/tensorboard")
events.Reload()
loss = events.Scalars("train/loss")
assert [e.step for e in loss] == [s for s in range(1, 31) if s != 15], [e.step for e in loss]
assert abs(loss[-1].value - 3.7) < 1e-6 and abs(loss[9].value - 4.9) < 1e-6
assert abs(loss[-1].wall_time - loss[-2].wall_time - 0.5) < 1e-3
assert len(events.Scalars("ranks/imbalance")) == 20
PY
else skip tensorboard_reads_it 'the Python package tensorboard is not installed'; fi

# ---- several runs in one picture ---------------------------------------------------------------------------
for python in python3 /usr/bin/python3; do "$python" -c 'import matplotlib' 2> /dev/null && break; done
if "$python" -c 'import matplotlib' 2> /dev/null; then
    outcome several_runs 0 '^wrote both.png: odd/log.jsonl: 30 steps, loss 4.990 to 3.700$' \
        "$python" "$scripts/plot_run.py" real odd --out both.png
    has both_are_drawn '^wrote both.png: real/log.jsonl: 6 steps' out.txt
    check picture test -s both.png
else skip several_runs 'matplotlib is not installed'; fi
finish
