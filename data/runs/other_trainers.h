// Options of other trainers, and what this one has instead: rows of the table of options.
#ifndef UNPAD_OTHER_TRAINERS_H
#define UNPAD_OTHER_TRAINERS_H

#include "../base/options.h"

// clang-format off
#define OPTIONS_OF_OTHER_TRAINERS \
    OPTION_ELSEWHERE("epochs|num-epochs|num-train-epochs", \
                     "--steps counts optimizer steps; --dry-run says how many an epoch has"), \
    OPTION_ELSEWHERE("max-steps", "it is --steps"), \
    OPTION_ELSEWHERE("batch-size|per-device-train-batch-size|gradient-accumulation-steps", \
                     "--batch-tokens counts a step in tokens, --micro-batch-tokens one pass " \
                     "through the model"), \
    OPTION_ELSEWHERE("learning-rate", "it is --lr"), \
    OPTION_ELSEWHERE("output-dir", "it is --out"), \
    OPTION_ELSEWHERE("lora", "there is no LoRA: training changes all weights"), \
    OPTION_ELSEWHERE("wandb|tensorboard|report-to", \
                     "scripts/follow_run.py copies the log of a run there, also while it grows"), \
    OPTION_ELSEWHERE("gradient-checkpointing|activation-checkpointing", \
                     "it is --recompute full; --dry-run prints what activations take"), \
    OPTION_ELSEWHERE("export|export-type|export-gguf", \
                     "scripts/export_gguf.py DIR MODEL.gguf writes llama.cpp's format"), \
    OPTION_ELSEWHERE("boundary-ends", "data/convert.py makes shards of such files"), \
    OPTION_ELSEWHERE("work-cost", "it has left: the planner's cost model is fixed"), \
    OPTION_ELSEWHERE("init-from", "--model takes the weights of a checkpoint"), \
    OPTION_ELSEWHERE("prompt-file", "it is --prompt @FILE, one prompt per line"), \
    OPTION_ELSEWHERE("zero", "several ranks always shard the optimizer state"), \
    OPTION_ELSEWHERE("beta1|eps", "AdamW's beta1 is 0.9, its eps 1e-8"), \
    OPTION_ELSEWHERE("top-k", "--top-p cuts unlikely tokens off"), \
    OPTION_ELSEWHERE("max-new-tokens", "it is --sample-tokens"), \
    OPTION_ELSEWHERE("max-skips", "five non-finite steps in a row end a run"), \
    OPTION_ELSEWHERE("strict", "a JSON line without a text is left out and counted"), \
    OPTION_ELSEWHERE("boundary-ends", "data/convert.py writes an index"), \
    OPTION_ELSEWHERE("compare-steps", "it is --compare STEPS"), \
    OPTION_ELSEWHERE("cuda-graph", "it has left: every micro-batch is launched as it is"), \
    OPTION_ELSEWHERE("self-check", "`make check` runs every operation on this machine's GPU")
// clang-format on

#endif
