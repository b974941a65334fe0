#!/usr/bin/env python3
"""Copies the log of a run, as it grows, to TensorBoard or Weights & Biases. Ctrl-C ends it.

usage: follow_run.py RUN_DIR_OR_LOG [--tensorboard DIR] [--wandb PROJECT] [--once]
"""
import os
import sys
import time

from report import Parser, fail, is_number, parse_record

NAMES = {"loss": "train/loss", "grad_norm": "train/grad_norm", "lr": "train/lr",
         "tokens_per_s": "speed/tokens_per_s", "ms": "speed/ms", "read_ms": "speed/read_ms",
         "useful_tflops": "speed/useful_tflops", "fill": "packing/fill", "docs": "packing/docs",
         "imbalance_measured": "ranks/imbalance"}


class TensorBoard:
    def __init__(self, folder):
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            fail(2, "tensorboard is not installed", "run: pip install tensorboard")
        self.proto, self.summary, self.writer = event_pb2, summary_pb2, EventFileWriter(folder)
        self.begin({}, 0)       # drops what an earlier follow_run.py wrote

    def begin(self, options, step):
        """TensorBoard drops its records of later steps."""
        status = self.proto.SessionLog(status=self.proto.SessionLog.START)
        self.writer.add_event(self.proto.Event(wall_time=time.time(), step=step + 1,
                                               session_log=status))

    def write(self, step, wall_time, values):
        values = [self.summary.Summary.Value(tag=k, simple_value=v) for k, v in values.items()]
        self.writer.add_event(self.proto.Event(wall_time=wall_time, step=step,
                                               summary=self.summary.Summary(value=values)))
        self.writer.flush()


class WeightsAndBiases:
    """Runs there can only grow, so replaced steps start another run in the same group."""

    def __init__(self, project, name):
        try:
            import wandb
        except ImportError:
            fail(2, "wandb is not installed", "run: pip install wandb")
        self.wandb, self.project, self.name, self.run = wandb, project, name, None

    def begin(self, options, step):
        if self.run:
            self.run.finish()
        self.run = self.wandb.init(project=self.project, name=self.name, group=self.name,
                                   config=options)

    def write(self, step, wall_time, values):
        if not self.run:
            self.begin({}, 0)
        self.run.log(values, step=step)


class Log:
    def __init__(self, path, sinks):
        self.path, self.sinks, self.time = path, sinks, time.time()     # of the last record
        self.at, self.last_line, self.last_step = 0, b"", -1

    def new_lines(self):
        """New complete lines; all lines if the log was cut, as a resumed run does."""
        if not os.path.exists(self.path):
            return []
        with open(self.path, "rb") as file:
            # the last line read is unique: it has a step, its loss and its time
            file.seek(self.at - len(self.last_line))
            if file.read(len(self.last_line)) != self.last_line:
                file.seek(0)
                self.at = 0
            lines = [line for line in file if line.endswith(b"\n")]
        if lines:
            self.at += sum(map(len, lines))
            self.last_line = lines[-1]
        return lines

    def copy(self):
        """Copies new records; returns their number."""
        count = 0
        for line in self.new_lines():
            record = parse_record(line.decode("utf-8", errors="replace"))
            if record is None:
                print(f"warning: {self.path}: not a record: {line[:40]!r}", file=sys.stderr)
                continue
            count += 1
            step, event = record["step"], record.get("event")
            names = NAMES if event is None else {"loss": "val/loss"} if event == "val" else {}
            values = {name: record[key] for key, name in names.items()
                      if is_number(record.get(key))}
            if event == "start" or event == "resume" and step < self.last_step:
                for sink in self.sinks:
                    sink.begin(record["options"], step)
            self.time = record["time"] if is_number(record.get("time")) else self.time
            for sink in self.sinks if values else []:
                sink.write(step, self.time, values)
            self.last_step = step
        return count


def main():
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="the --out directory of a run, or its log.jsonl")
    parser.add_argument("--tensorboard", metavar="DIR", nargs="?", const="",
                        help="event files for tensorboard --logdir DIR (default: RUN/tensorboard)")
    parser.add_argument("--wandb", metavar="PROJECT", help="log to a run in this W&B project")
    parser.add_argument("--once", action="store_true", help="copy the existing records and exit")
    args = parser.parse_args()
    path = args.run if args.run.endswith(".jsonl") else os.path.join(args.run, "log.jsonl")
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        fail(3, f"{args.run}: expected the --out directory of a run, found none",
             "start the run first")
    sinks = [WeightsAndBiases(args.wandb, os.path.basename(folder))] if args.wandb else []
    if args.tensorboard is not None or not sinks:
        sinks.append(TensorBoard(args.tensorboard or os.path.join(folder, "tensorboard")))
    log = Log(path, sinks)
    try:
        while True:
            copied = log.copy()
            if copied:
                print(f"copied {copied} records, up to step {log.last_step}", flush=True)
            if args.once:
                break
            time.sleep(1)
    except KeyboardInterrupt:
        print()
    if args.once and log.last_step < 0:
        fail(3, f"{path}: expected at least one record, found none",
             "give the --out directory of a run, or its log.jsonl")


if __name__ == "__main__":
    main()
