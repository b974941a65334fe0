#!/usr/bin/env bash
# Where people look at a run: a report, TensorBoard and W&B followed live.
. "$(dirname "$0")/lib.sh"
scripts=$root/scripts
# ---- a log with everything: a resume, spikes, bad lines, half a line ------------------------------
cat > log.py <<'PY'
import json, sys
def step(s, loss=None, **more):
    return dict({"step": s, "loss": 5.0 - s / 100 if loss is None else loss, "grad_norm": 1.5,
                 "lr": 1e-3, "ms": 500.0, "tokens_per_s": 2000.0 + s, "real_tokens": 1000,
                 "time": 1795400000 + s, "fill": 0.9, "docs": 7, "attention_pairs": 20000, "padded_pairs": 100000,
                 "padded_tokens": 3080}, **more)
def start(event, s):
    options = {"model": "m", "train": "gone", "steps": 40, "layout": "packed", "max-seqlen": 64}
    return {"event": event, "step": s, "options": options}
if __name__ == "__main__":
    first = [start("start", 0)] + [step(s) for s in range(1, 21)]
    again = [start("resume", 10)] + [
        step(s, 4.0 - s / 100, imbalance_measured=1.25) for s in range(11, 31)]
    again[3] = dict(again[3], spike=True, loss=987.5)
    again[5] = dict(again[5], loss=None, grad_norm=None, skipped=True)
    again.append({"event": "val", "step": 30, "loss": 3.5})
    again += [{"event": "sample", "step": 30, "number": n, "text": "<b>%d" % n} for n in (1, 2)]
    again.append({"event": "of a later version", "step": 30})
    lines = [json.dumps(r) for r in first + again]
    lines[3:3] = ["garbage", '{"step": 3}', "[1]"]      # lines 4 to 6
    open(sys.argv[1], "w").write("\n".join(lines) + '\n{"step": 31, "lo')
PY
mkdir odd none diverged pairs && python3 log.py odd/log.jsonl
head -n 1 odd/log.jsonl > none/log.jsonl
lines_of() { python3 -c 'import json, log; print("\n".join(json.dumps(r) for r in '"$1"'))'; }
# ---- the report -----------------------------------------------------------------------------------
report() { python3 "$scripts/report.py" "$@"; }
echo mine > mine && ln -s ../mine odd/report.html.tmp
outcome one_run 0 '^wrote odd/report.html: odd/log.jsonl: 30 steps, loss 4.990 to 3.700, validation 3.500' report odd
has bad_lines_are_named '^warning: odd/log.jsonl: .*: line 4, 5, 6$' out.txt
has no_link_is_followed '^mine$' mine
has skipped_steps_and_spikes_are_marked '>×</text>.*>▾</text>|>▾</text>.*>×</text>' odd/report.html
has packing_is_measured 'padded rows would have 3\.08 times the tokens and 5\.00 times' odd/report.html
check a_page_needs_no_network eval '! grep -nE "https?:|src=|@import|url\(" odd/report.html'
check_python charts_have_points <<'PY'
page = open("odd/report.html").read()
figures = page.split("<figure>")[1:]
assert len(figures) == 7 and all("<title>step 30: " in figure for figure in figures)
assert "<title>step 14: loss " in figures[0] and "&lt;b&gt;1</td>" in page and "&lt;b&gt;2</td>" in page
PY
lines_of '[log.start("start", 0), dict(log.step(1, imbalance_measured=-1), loss=None, grad_norm=None)]' > diverged/log.jsonl
pair='accuracy=s / 8, margin=s / 10 - .3, reward_chosen=-s / 100, reward_rejected=.2 - s / 8'
lines_of "[log.start('start', 0)] + [log.step(s, $pair) for s in range(1, 9)] + [dict(log.step(s, $pair), event='val') for s in (0, 8)]" > pairs/log.jsonl
outcome a_run_of_pairs 0 '^wrote pairs/report.html' report pairs
check_python pairs_have_charts <<'PY'
for figure, last, first in zip(open("pairs/report.html").read().split("<figure>")[2:6],
                               ("accuracy 1", "margin 0.5", "reward_chosen -0.08", "reward_rejected -0.8"), (0, -0.3, 0, 0.2)):
    assert "<title>step 8: %s<" % last in figure and "<title>step 0: validation %g<" % first in figure, last
PY
outcome diverged_at_once 0 '1 steps, loss not finite' report diverged
expect no_run_given 2 'the following arguments are required' report
expect before_the_first_step 3 'expected at least one step' report none
expect nothing_there 3 'cannot read' report nothing
expect not_writable 4 'cannot write' report odd --out missing/x.html
# ---- the charts of dev/results are what the recorded files say --------------------------------------
check_python charts_are_of_the_newest_files "$root" <<'PY'
import pathlib, zlib
results = pathlib.Path(sys.argv[1] + "/dev/results")
for chart in results.glob("*.svg"):
    name, crc = re.search(r"([\w.-]+) crc32 ([0-9a-f]{8})", chart.read_text()).groups()
    newest = max(results.rglob(re.sub(r"\d{4}-\d\d-\d\d", "*", name)))   # scaling.txt: in a dated directory
    assert name == newest.name, (chart, newest)
    assert zlib.crc32(newest.read_bytes()) == int(crc, 16), (chart, newest, "run dev/charts.py")
PY
# ---- followed live; a stand-in for wandb writes down what it is given ------------------------------
mkdir stand_in live
cat > stand_in/wandb.py <<'PY'
class Run:
    def log(self, values, step):
        assert all(isinstance(v, (int, float)) for v in values.values()), values
        print("log", step, sorted(values.items()), flush=True)
    def finish(self): print("finish", flush=True)
def init(**what):
    print("init", what["project"], what["name"], what["config"].get("steps"), flush=True)
    return Run()
PY
export PYTHONPATH=$work/stand_in
follow=(python3 -u "$scripts/follow_run.py")
timeout "$limit_s" "${follow[@]}" live --wandb project > followed.txt 2>&1 & pid=$!
lines_of '[log.start("start", 0), log.step(1), log.step(2), {"event": "val", "step": 2, "loss": 4.5, "margin": -0.5}]' \
    > live/log.jsonl
check follows await_line $pid '^copied .* step 2$' followed.txt
has w_and_b_run '^init project live 40$' followed.txt
has w_and_b_step "^log 1 .*'train/loss', 4.99" followed.txt
has w_and_b_validation "^log 2 \[\('val/loss', 4.5\), \('val/margin', -0.5\)\]" followed.txt
lines_of '[log.step(3)]' > third
tr -d '\n' < third | head -c 30 >> live/log.jsonl
sleep 1.2
tail -c +31 third >> live/log.jsonl
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
outcome follow_names_bad_lines 0 "^warning: odd/log.jsonl: not a record: b'garbage" "${follow[@]}" odd --wandb p --once
lacks half_a_line_waits 'not a record.*31' out.txt
# every key of every record with values of other types
mkdir others && python > others/log.jsonl <<'PY'
import log
full = {"time": 1, "host": "h", "command": ["a"], "device_mib": 1, "parameters": 5, "data": {"train": {}}}
start = log.start("start", 0)
for record in (log.step(1, read_ms=1.5, imbalance_measured=1, margin=-1, accuracy=0), start, {**start, **full},
               {**start["options"], "warmup-steps": 1}, {"event": "val", "step": 1, "loss": 3}):
    for key in [*record, "event"]:
        for value in (None, True, -1, 0, 10**400, 1e308, float("nan"), "x", "\ud800<b>", [], {}, [1], [[]], {"a": 1},
                      {"x": {}}):
            if key in start["options"]: print(json.dumps({**start, "options": {key: value}}))
            print(json.dumps({**record, key: value}))
print("[" * 100000, json.dumps(log.step(1)), sep="\n")
PY
outcome report_values_of_other_types 0 '^wrote others/report.html' report others
export PYTHONIOENCODING=utf-8:backslashreplace
outcome follow_values_of_other_types 0 '^copied ' "${follow[@]}" others --wandb p --once
expect follow_without_a_run 3 'expected the --out directory' "${follow[@]}" nothing --once
mkdir no_package && echo 'raise ImportError' > no_package/tensorboard.py
PYTHONPATH=no_package expect no_tensorboard 2 'tensorboard is not installed' "${follow[@]}" odd --once
with_package tensorboard_reads_it tensorboard || finish
check tensorboard "${follow[@]}" odd --once
check_python tensorboard_reads_it <<'PY'
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator("odd/tensorboard")
events.Reload()
loss = events.Scalars("train/loss")
assert [e.step for e in loss] == [s for s in range(1, 31) if s != 15], [e.step for e in loss]
assert abs(loss[-1].value - 3.7) < 1e-6 and abs(loss[9].value - 4.9) < 1e-6
assert loss[-1].wall_time - loss[-2].wall_time == 1, "the time in the log"
PY
finish
