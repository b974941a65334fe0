#!/usr/bin/env python3
"""Copies the log of a run, as it grows, to TensorBoard or Weights & Biases. Ctrl-C ends it."""
import os
import time

from command import BAD_INPUT, Parser, fail, load, run_main, warn
from report import is_number, parse_record


class TensorBoard:
    def __init__(self, folder):
        self.event, self.summary, files = load(
            "tensorboard.compat.proto.event_pb2", "tensorboard.compat.proto.summary_pb2",
            "tensorboard.summary.writer.event_file_writer")
        self.writer = files.EventFileWriter(folder)

    def begin(self, options, step):
        """TensorBoard drops its records of later steps, an earlier follow_run.py's too."""
        status = self.event.SessionLog(status=self.event.SessionLog.START)
        self.writer.add_event(self.event.Event(wall_time=time.time(), step=step + 1,
                                               session_log=status))

    def write(self, step, wall_time, values):
        values = [self.summary.Summary.Value(tag=k, simple_value=v) for k, v in values.items()]
        self.writer.add_event(self.event.Event(wall_time=wall_time, step=step,
                                               summary=self.summary.Summary(value=values)))
        self.writer.flush()


class WeightsAndBiases:
    """Runs there can only grow, so replaced steps start another run in the same group."""

    def __init__(self, project, name):
        (wandb,) = load("wandb")
        self.wandb, self.project, self.name, self.run = wandb, project, name, None

    def begin(self, options, step):
        if self.run:
            self.run.finish()
        self.run = self.wandb.init(project=self.project, name=self.name, group=self.name,
                                   config=options)

    def write(self, step, wall_time, values):
        self.run.log(values, step=step)


def new_records(path):
    """Yields the new records in lists, for ever; all of them if a resumed run has cut the log."""
    at, last = 0, b""
    while True:
        lines = []
        if os.path.exists(path):
            with open(path, "rb") as file:
                # the last line read is unique: it has a step, its loss and its time
                file.seek(at - len(last))
                if file.read(len(last)) != last:
                    at = file.seek(0)
                lines = [line for line in file if line.endswith(b"\n")]
        at, last = at + sum(map(len, lines)), lines[-1] if lines else last
        found = [parse_record(line.decode("utf-8", errors="replace")) for line in lines]
        for line in [line for line, record in zip(lines, found) if record is None]:
            warn(f"{path}: not a record: {line[:40]!r}")
        yield list(filter(None, found))


def copy(record, sink, last_step, wall_time):
    """Copies the numbers of a record after one of last_step, at wall_time; returns both of it."""
    step, event = record["step"], record.get("event")
    values = {("val/" if event else "train/") + key: value for key, value in record.items()
              if event in (None, "val") and key not in ("step", "time") and is_number(value)}
    wall_time = record["time"] if is_number(record.get("time")) else wall_time
    if last_step < 0 or event == "start" or event == "resume" and step < last_step:
        sink.begin(record.get("options", {}), step if last_step >= 0 else 0)
    if values:
        sink.write(step, wall_time, values)
    return step, wall_time


def main():
    parser = Parser()
    parser.add_argument("run", metavar="RUN", help="the directory of a run, or its log.jsonl")
    parser.add_argument("--wandb", metavar="PROJECT",
                        help="log to W&B (default: files for tensorboard --logdir RUN/tensorboard)")
    parser.add_argument("--once", action="store_true", help="copy the existing records and exit")
    args = parser.parse_args()
    path = args.run if args.run.endswith(".jsonl") else os.path.join(args.run, "log.jsonl")
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        fail(BAD_INPUT, f"{args.run}: expected the --out directory of a run, found none",
             "start the run first")
    sink = (WeightsAndBiases(args.wandb, os.path.basename(folder)) if args.wandb else
            TensorBoard(os.path.join(folder, "tensorboard")))
    last = -1, time.time()  # its step and its time
    try:
        for records in new_records(path):
            for record in records:
                last = copy(record, sink, *last)
            if records:
                print(f"copied {len(records)} records, up to step {last[0]}", flush=True)
            if args.once:
                break
            time.sleep(1)
    except KeyboardInterrupt:
        print()
    if args.once and last[0] < 0:
        fail(BAD_INPUT, f"{path}: expected at least one record, found none",
             "give the --out directory of a run, or its log.jsonl")


if __name__ == "__main__":
    run_main(main)
