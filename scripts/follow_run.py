#!/usr/bin/env python3
"""Copies the log of a run, as it grows, to TensorBoard or Weights & Biases. Ctrl-C ends it.

usage: follow_run.py RUN_DIR_OR_LOG [--tensorboard DIR] [--wandb PROJECT] [--once]
"""
import argparse
import os
import sys
import time

from plot_run import fail, parse_record

NAMES = {"loss": "train/loss", "grad_norm": "train/grad_norm", "lr": "train/lr",
         "tokens_per_s": "speed/tokens_per_s", "trained_tokens_per_s": "speed/trained_tokens_per_s",
         "ms": "speed/ms", "read_ms": "speed/read_ms", "passes_ms": "speed/passes_ms",
         "useful_tflops": "speed/useful_tflops", "fill": "packing/fill",
         "docs": "packing/docs", "longest_doc": "packing/longest_doc",
         "imbalance_measured": "ranks/imbalance"}


class Log:
    """The records of a log that grows, and that a resumed run first cuts."""

    def __init__(self, path):
        self.path, self.at, self.last_line, self.num_lines = path, 0, b"", 0
        self.last_step = -1             # of the records that poll() returned

    def poll(self):
        """The whole lines that are new, and whether they replace all earlier ones."""
        try:
            file = open(self.path, "rb")
        except FileNotFoundError:
            return [], False
        except OSError as e:
            fail(3, f"{self.path}: cannot read: {e.strerror}",
                 "give the --out directory of a run, or its log.jsonl")
        with file:
            # The line read last is unique: it has a step, its loss and its time.
            file.seek(self.at - len(self.last_line))
            cut = file.read(len(self.last_line)) != self.last_line
            if cut:
                file.seek(0)
                self.at = self.num_lines = 0
                self.last_line = b""
            lines = [line for line in file if line.endswith(b"\n")]
            changed = os.fstat(file.fileno()).st_mtime
        if lines:
            self.at += sum(map(len, lines))
            self.last_line = lines[-1]
        return self.records(lines, changed), cut

    def records(self, lines, changed):
        """With the time of each as "time": the file's last change, and back by the steps' ms."""
        out = []
        for line in lines:
            self.num_lines += 1
            record = parse_record(line.decode("utf-8", errors="replace"))
            if record is None:
                print(f"warning: {self.path}: line {self.num_lines} is not a record",
                      file=sys.stderr)
            else:
                out.append(record)
        for record in reversed(out):
            record["time"] = changed
            changed -= record.get("ms", 0) / 1e3
        return out


class TensorBoard:
    def __init__(self, folder):
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            fail(2, "tensorboard is not installed", "run: pip install tensorboard")
        self.Event, self.Summary, self.START = Event, Summary, SessionLog.START
        self.SessionLog, self.writer = SessionLog, EventFileWriter(folder)
        self.drop_after(-1)             # what an earlier follow_run.py wrote

    def start(self, options):
        pass

    def drop_after(self, step):
        """TensorBoard drops what it has of later steps."""
        self.writer.add_event(self.Event(wall_time=time.time(), step=step + 1,
                                         session_log=self.SessionLog(status=self.START)))

    def write(self, step, wall_time, values):
        values = [self.Summary.Value(tag=k, simple_value=v) for k, v in values.items()]
        self.writer.add_event(self.Event(wall_time=wall_time, step=step,
                                         summary=self.Summary(value=values)))

    def flush(self):
        self.writer.flush()


class WeightsAndBiases:
    """A run there only grows, so steps that are replaced begin another one, in the same group."""

    def __init__(self, project, name):
        try:
            import wandb
        except ImportError:
            fail(2, "wandb is not installed", "run: pip install wandb")
        self.wandb, self.project, self.name = wandb, project, name
        self.run, self.options = None, {}

    def start(self, options):
        self.options = options

    def drop_after(self, _):
        if self.run:
            self.run.finish()
            self.run = None

    def write(self, step, _, values):
        if not self.run:
            self.run = self.wandb.init(project=self.project, name=self.name, group=self.name,
                                       config=self.options)
        self.run.log(values, step=step)

    def flush(self):
        pass


def values_of(record):
    """What is finite of it, by name; {} of other events than a validation."""
    names = {"loss": "val/loss"} if record.get("event") == "val" else NAMES
    if record.get("event") not in (None, "val"):
        return {}
    return {name: record[key] for key, name in names.items() if record.get(key) is not None}


def copy(log, sinks):
    """Copies what is new; returns how many records that is."""
    records, cut = log.poll()
    if cut:
        log.last_step = -1
        for sink in sinks:
            sink.drop_after(-1)         # and write all that is left again
    for record in records:
        step, options, values = record["step"], record.get("options"), values_of(record)
        for sink in sinks:
            if options is not None:
                sink.start(options)
                if step < log.last_step:
                    sink.drop_after(step)
            if values:
                sink.write(step, record["time"], values)
        log.last_step = step
    for sink in sinks:
        sink.flush()
    return len(records)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="the --out directory of a run, or its log.jsonl")
    parser.add_argument("--tensorboard", metavar="DIR", nargs="?", const="",
                        help="event files for tensorboard --logdir DIR (default: RUN/tensorboard)")
    parser.add_argument("--wandb", metavar="PROJECT", help="a run of this W&B project")
    parser.add_argument("--once", action="store_true", help="copy what is there and end")
    args = parser.parse_args()
    is_log = args.run.endswith(".jsonl")
    path = args.run if is_log else os.path.join(args.run, "log.jsonl")
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        fail(3, f"{args.run}: expected the --out directory of a run, found none",
             "start the run first")
    sinks = []
    if args.wandb:
        sinks.append(WeightsAndBiases(args.wandb, os.path.basename(folder)))
    if args.tensorboard is not None or not sinks:
        sinks.append(TensorBoard(args.tensorboard or os.path.join(folder, "tensorboard")))
    log, total = Log(path), 0
    try:
        while True:
            copied = copy(log, sinks)
            total += copied
            if copied:
                print(f"copied {total} records, up to step {log.last_step}", flush=True)
            if args.once:
                break
            time.sleep(1)
    except KeyboardInterrupt:
        print()
    if args.once and total == 0:
        fail(3, f"{path}: expected at least one record, found none",
             "give the --out directory of a run, or its log.jsonl")


if __name__ == "__main__":
    main()
