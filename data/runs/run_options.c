#include "run_options.h"

#include <math.h>
#include <string.h>

#include "../base/memory.h"
#include "../batches/pairs.h"
#include "../models/weights.h"
#include "../shards/sources.h"
#include "out_dir.h"

#define OPTION_VALUES Options
const Option run_option_table[] = {
    OPTION_GROUP("model"),
    DIRECTORY("model", model, "demo",
              "Hugging Face directory, or a built-in name: demo, smollm2-135m, smollm2-360m, "
              "smollm2-1.7b, llama-3.2-1b, llama-3.2-3b, llama-3.1-8b"),
    FLAG("from-scratch", from_scratch, "start from random weights, as a built-in name always does"),
    NUMBER("lora", lora, "0", 0, 1024,
           "train LoRA adapters of this rank while the model stays frozen; 0: train the model"),
    NUMBER("lora-alpha", lora_alpha, "0", 0, 1e6,
           "scale adapters by alpha / rank; 0: twice the rank"),
    TEXT("lora-targets", lora_targets, "all",
         "linear layers with adapters: all, or some of q,k,v,o,gate,up,down"),
    FLAG("lora-merge", lora_merge,
         "write the whole model to final/, with the adapters added, instead of the adapters alone"),
    CHOICE(
        "base", base, "full", "full|nf4",
        "precision of the frozen matrices of layers: full, or 4-bit NF4 as in QLoRA; default for "
        "--adapter: as it was trained"),
    DIRECTORY("adapter", adapter, NULL,
              "LoRA adapters of --model, or of the base model that they name: --train trains them "
              "further, --generate and --eval use them, --lora-merge merges them"),
    OPTION_GROUP("data"),
    DIRECTORY(
        "train", train, "data/demo",
        "training data: a directory, file or glob; shards, or texts (.txt, .jsonl, a directory of "
        "them), which are tokenized once into --out; web:0.7,code:0.3 is a mixture by tokens"),
    DIRECTORY(
        "val", val, NULL,
        "validation shards or texts; default: the val shards of --train, or 1 % of its texts"),
    CHOICE("train-on", train_on, "assistant", "assistant|all", "which turns of a chat to train on"),
    CHOICE("invalid-utf8", invalid_utf8, "refuse", "refuse|replace",
           "texts of which more than 1 byte in 1,000 is not UTF-8"),
    CHOICE("layout", layout, "packed", "packed|padded|rows|repad|shared",
           "how documents fill a batch"),
    NUMBER("max-seqlen", max_seqlen, "1024", 1, 1 << 24,
           "longest sequence: longer documents are split; also the length of full rows"),
    CHOICE(
        "pad-to", pad_to, "longest", "longest|max",
        "rows of --layout padded and repad: as long as the longest document of each micro-batch, "
        "as collators pad, or --max-seqlen"),
    NUMBER("micro-batch-tokens", micro_batch_tokens, "4096", 1, 1 << 29,
           "capacity of the 1D token buffer"),
    NUMBER("batch-tokens", batch_tokens, "0", 0, 1e12,
           "capacity of one optimizer step, a multiple of --micro-batch-tokens; 0: one micro-batch "
           "a rank"),
    NUMBER("fill", fill, "0", 0, 1,
           "fraction of a step's capacity to use at most, beyond the documents that fit at any "
           "length; 0: 1 for one micro-batch a step, else 0.97"),
    CHOICE("long-docs", long_docs, "split", "split|truncate|drop|error",
           "documents longer than --max-seqlen"),
    NUMBER(
        "boundary-token", boundary_token, "-1", -1, 1 << 30,
        "llm.c's shards: the token that begins each document; -1: 50256, or 128000 of 32-bit ids"),
    FLAG("allow-other-tokenizer", allow_other_tokenizer,
         "train on shards that were not made with the model's tokenizer.json"),
    OPTION_GROUP("run"),
    DIRECTORY("out", out, "out/demo", "directory of log.jsonl, checkpoints and final/"),
    TEXT("options", options, NULL,
         "read options from a file, one a line (lr 1e-4), such as RUN/options, which each run "
         "writes; those of the command line win"),
    OPTION("resume", OPTION_DIRECTORY, resume, NULL, "newest", 0, 0,
           "continue from a checkpoint (without DIR: the newest valid one in --out) with that "
           "run's options; options given here override them. Together with --train it starts the "
           "run where there is no checkpoint yet"),
    FLAG("overwrite", overwrite,
         "replace the run in --out: its checkpoints, final/ and log are removed"),
    NUMBER("steps", steps, "300", 0, 1e12,
           "optimizer steps; 0: validate, print samples, and write no checkpoint or log"),
    NUMBER("epochs", epochs, "0", 0, 1e6,
           "instead of --steps: passes over the data, such as 3 or 0.5; of a mixture, over each "
           "source at least"),
    NUMBER("seed", seed, "1", 0, 1e15, "of initial weights, document order and samples"),
    NUMBER("log-every", log_every, "-1", -1, 1e12,
           "steps between lines; 0: none; -1: one line a step, on a terminal about 100 a run and "
           "the latest step below them"),
    NUMBER("save-every", save_every, "-1", -1, 1e12,
           "steps between checkpoints; -1: one every ten minutes; 0: only at the end"),
    NUMBER("keep", keep, "2", 0, 1e6, "newest checkpoints kept; 0: all"),
    CHOICE("final-dtype", final_dtype, "fp32", MODEL_DTYPES,
           "of the weights in final/; checkpoints are fp32"),
    NUMBER("val-every", val_every, "50", 0, 1e12,
           "steps between validations, the first before training, the last after it; 0: never"),
    NUMBER("val-tokens", val_tokens, "65536", 1, 1e12,
           "validate on at most this many tokens, always the same whole documents"),
    TEXT("bench", bench, NULL,
         "multiple-choice questions, files or globs of JSON Lines: accuracy at each validation and "
         "by --eval, where --log-every 1 prints all scores"),
    OPTION(
        "ledger", OPTION_STRING, ledger, NULL, "", 0, 0,
        "write the loss of every document of every step and validation into ledger.bin of --out, "
        "for scripts/ledger.py; --eval --ledger=FILE: those of the documents evaluated"),
    OPTION_GROUP("preferences"),
    CHOICE("preference", preference, "off", "off|dpo|simpo",
           "train on records of a prompt and two answers, chosen and rejected; dpo compares with "
           "the model that the run starts from, simpo with no model"),
    NUMBER("beta", beta, NULL, 0, 1e6, "scale of rewards; default: 0.1 for dpo, 2 for simpo"),
    NUMBER("gamma", gamma, "1", -1e6, 1e6, "simpo: margin that the rewards shall differ by"),
    NUMBER("label-smoothing", label_smoothing, "0", 0, 0.5,
           "share of the pairs whose answers are in the wrong order"),
    NUMBER("sft-weight", sft_weight, "0", 0, 1e6, "add so much of the chosen answer's loss"),
    OPTION_GROUP("optimizer"),
    CHOICE("optimizer", optimizer, "adamw", "adamw|muon",
           "optimizer of the layers' matrices; muon needs half the state and takes the same --lr; "
           "everything else uses AdamW"),
    CHOICE("moments", moments, "fp32", MODEL_DTYPES,
           "dtype of the optimizer's moments, in memory and in checkpoints; bf16, with stochastic "
           "rounding, saves 4 bytes a parameter; --resume converts them"),
    NUMBER("lr", lr, NULL, 0, 1e30,
           "peak learning rate; default: 2e-3 for random weights, 2e-5 for those of --model, 2e-4 "
           "for --lora; a fortieth of it with --preference"),
    CHOICE("schedule", schedule, "wsd", SCHEDULE_NAMES,
           "wsd: stable, then decay over the last --decay-frac, linear or 1-sqrt"),
    NUMBER("warmup-steps", warmup_steps, "-1", -1, 1e12,
           "linear from 0; -1: 20, but at most a tenth of the run"),
    NUMBER("decay-frac", decay_frac, "0.2", 0, 1, "share of the steps that wsd decays over"),
    NUMBER("min-lr-frac", min_lr_frac, "0", 0, 1, "the decay ends at this share of --lr"),
    NUMBER("weight-decay", weight_decay, NULL, 0, 1e6,
           "on matrices, not on norm weights; default: 0.1 for random weights, else 0"),
    NUMBER("grad-clip", grad_clip, "1", 0, 1e30, "largest gradient norm; 0: no clipping"),
    OPTION_GROUP("samples"),
    NUMBER("sample-every", sample_every, "0", 0, 1e12, "steps between samples; 0: only at the end"),
    NUMBER("num-samples", num_samples, "3", 0, 64,
           "texts written each time, packed into one batch where they fit; 0: none"),
    NUMBER("sample-tokens", sample_tokens, "128", 1, 1 << 20,
           "tokens written per text, also by --generate"),
    TEXT("prompt", prompt, NULL,
         "how each text begins, or @FILE with one per line for --generate; default: the beginnings "
         "of validation documents"),
    NUMBER("temperature", temperature, "0.8", 0, 100, "0: always the likeliest token"),
    NUMBER("top-p", top_p, "0.95", 0, 1, "sample from the likeliest that sum to p"),
    OPTION_GROUP("machine"),
    NUMBER("threads", threads, "0", 0, 4096, "CPU threads; 0: OMP_NUM_THREADS, or all cores"),
    FLAG("bf16-matmul", bf16_matmul,
         "CPU: matmul inputs in bf16, sums in fp32; the start says where that is faster"),
    TEXT("attention", attention, "auto",
         "attention kernels: auto; CUDA: sm80, sm90; CPU: avx512, avx2, portable"),
    NUMBER("memory-gib", memory_gib, "0", 0, 1e6,
           "plan for this much device memory, with --dry-run of any machine; 0: all that is free"),
    FLAG("deterministic", deterministic,
         "same bits on any number of ranks, and not only on as many; takes memory for sums over "
         "micro-batches in a fixed order"),
    CHOICE(
        "recompute", recompute, "auto", "off|on|full|auto",
        "which activations backward recomputes to save memory, with the same results: none, norms "
        "and SwiGLU, or whole layers; auto: as few as fit"),
    NUMBER("replay-every", replay_every, "0", 0, 1 << 30,
           "every N steps, compute the gradients twice before the step and compare all bits: finds "
           "faulty memory, cores and GPUs; 0: never"),
    NUMBER("heartbeat-seconds", heartbeat_seconds, "60", 0, 1e6,
           "several ranks: seconds without progress before a rank is reported and the run ends "
           "with exit code 8; 0: never"),
    OPTION_GROUP("instead of training"),
    FLAG("generate", generate,
         "continue --prompt, or read standard input; in a terminal, type one prompt per line"),
    FLAG("chat", chat,
         "--generate: treat prompts as messages of a chat, in the model's chat template (or "
         "ChatML)"),
    FLAG("eval", eval,
         "loss and perplexity on every document of --val, or of --train, by document length"),
    OPTION("compare", OPTION_INT, compare, NULL, "3", 1, 1000,
           "time all layouts on the same documents, N steps of each"),
    OPTION("check-packing", OPTION_STRING, check_packing, NULL, "", 0, 0,
           "compare packed documents with each one alone; with FILE, also write the reference that "
           "dev/referee.py reads"),
    FLAG("dry-run", dry_run,
         "print the plan and the memory, and stop; to time a step, use --compare 1"),
    // options of other trainers that neither their spelling nor their first word leads to
    HINT("num-epochs|num-train-epochs|max-steps|num-iterations|max-iters", "--epochs, or --steps"),
    HINT("learning-rate|lr-scheduler*", "it is --lr, with --schedule and --warmup-steps"),
    HINT("output-dir", "it is --out"),
    HINT("base-model|hf-path|tokenizer*", "it is --model, whose tokenizer is used"),
    HINT("config|config-file", "it is --options FILE, with one option a line"),
    HINT("max-seq-length|max-length|seq-len*|sequence-len*|block-size|cutoff-len",
         "it is --max-seqlen"),
    HINT("max-grad-norm|clip-grad*|gradient-clipping", "it is --grad-clip"),
    HINT("eval-*|val-*", "it is --val-every, with --val and --val-tokens"),
    HINT("per-device*|grad-accum*|gradient-accumulation*|device-batch-size|total-batch-size",
         "--batch-tokens counts a step in tokens, --micro-batch-tokens one pass through the model"),
    HINT("dataset*|data-path|input-bin", "it is --train: text files, JSONL or shards"),
    HINT("log*", "it is --log-every"),
    HINT("use-peft|peft*|target-modules", "it is --lora RANK, with --lora-targets"),
    HINT("load-in*|qlora", "it is --lora RANK --base nf4"),
    HINT("wandb*|report-to|run-name|run",
         "scripts/follow_run.py copies the log of a run there, also while it grows"),
    HINT("packing|sample-packing|flash*|attn*",
         "it is the default; --layout padded and --compare show the others"),
    HINT("gradient-checkpointing|activation-checkpointing",
         "it is --recompute full; --dry-run prints what activations take"),
    HINT("assistant-only-loss|completion-only-loss", "it is the default of --train-on"),
    HINT("dtype|torch-dtype|fp16",
         "CUDA computes in bf16 with exact fp32 weights, the CPU in fp32"),
    HINT("max-new-tokens|max-tokens", "it is --sample-tokens"),
    HINT("-*", "options have two dashes; llm.c's -i is --train, -j --val, -e --model, -o --out"),
    OPTION_END,
};

static const char usage[] =
    "./train_llama --model DIR --train TEXTS --out RUN [options]\n"
    "       ./train_llama --resume --out RUN                          resumes after Ctrl-C\n"
    "       ./train_llama --model RUN/final --generate [--chat]       prompts from the terminal";

// The options that most runs need, for --help
static const char options_of_help[] =
    "model|train|val|out|resume|overwrite|max-seqlen|micro-batch-tokens|batch-tokens|steps|lr|"
    "epochs|options|save-every|log-every|compare|prompt|generate|chat|dry-run";

// Options of this start and this machine, which --resume does not take from the run it continues
static const char options_of_a_start[] =
    "options|out|resume|overwrite|log-every|threads|memory-gib|heartbeat-seconds|compare|"
    "check-packing|generate|chat|eval|dry-run";

static const char options_of_generate[] =
    "options|generate|prompt|chat|sample-tokens|temperature|top-p|seed|model|from-scratch|"
    "max-seqlen|micro-batch-tokens|threads|memory-gib|bf16-matmul|attention|adapter|base|dry-run";
static const char options_of_eval[] =
    "options|eval|train|val|bench|ledger|log-every|train-on|invalid-utf8|long-docs|boundary-token|"
    "allow-other-tokenizer|seed|model|adapter|base|from-scratch|max-seqlen|micro-batch-tokens|"
    "threads|memory-gib|bf16-matmul|attention|heartbeat-seconds|dry-run";

static const char options_of_merge[] =
    "options|adapter|lora-merge|model|out|overwrite|final-dtype|threads|memory-gib|dry-run";

static OptionGiver is_given(const Options *o, const char *name) {
    return option_given(&o->set, name);
}

void run_options_parse(Options *o, int argc, char **argv, const char *version, int num_ranks) {
    options_open(&o->set, run_option_table);
    options_parse_or_exit(&o->set, argc, argv, usage, options_of_help, version);
    char *out = options_memory(&o->set, strlen(o->out) + 1);
    o->out = strcpy(out, o->out);
    for (size_t n = strlen(out); n > 1 && out[n - 1] == '/';) out[--n] = 0;
    if (o->chat && !o->generate)
        exit_with(EXIT_USAGE, "add --generate, or leave it out", "--chat belongs to --generate");
    if (o->resume && o->overwrite)
        exit_with(EXIT_USAGE, "--resume continues the run in --out, --overwrite replaces it",
                  "--resume and --overwrite: expected at most one of them");
    const OptionGiver steps = is_given(o, "steps"), epochs = is_given(o, "epochs");
    if (steps > epochs) o->epochs = 0;  // the command line wins
    if (steps && steps == epochs)
        exit_with(EXIT_USAGE, "leave one of them out",
                  "--steps and --epochs: expected at most one of them");
    if (is_given(o, "warmup-steps") && o->steps > 0 && o->warmup_steps >= o->steps)
        warning("--warmup-steps %ld, --steps %ld: the run never reaches --lr", o->warmup_steps,
                o->steps);
    const bool own_buffer = is_given(o, "micro-batch-tokens");
    const int most = o->preference ? 2 * o->max_seqlen : o->max_seqlen;  // of what must fit
    if ((o->generate || o->eval || !own_buffer) && o->micro_batch_tokens < most)
        o->micro_batch_tokens = most;
    if (o->batch_tokens == 0) o->batch_tokens = (int64_t)o->micro_batch_tokens * num_ranks;
}

// ---- The file of options ------------------------------------------------------------------------

char *run_options_file(const Options *o, bool all) {
    char except[320];
    snprintf(except, sizeof except, "%s|%s", options_of_a_start,
             o->epochs > 0 ? "steps" : "epochs");  // they exclude each other
    return options_file(&o->set, except, all);
}

bool run_options_write(const Options *o, bool all, Error *err) {
    AUTO_FREE char *text = run_options_file(o, all);
    return options_write(text, PATH_IN(o->out, "options"), err);
}

bool run_options_read(Options *was, const char *dir, Error *err) {
    options_open(&was->set, run_option_table);
    return options_read(&was->set, PATH_IN(dir, "options"), GIVEN_BY_RUN,
                        "--resume needs a step-NNNNNNNN directory, which earlier versions wrote "
                        "without this file; --model DIR starts from the weights of a model such as "
                        "final/",
                        err);
}

void run_options_print_changes(const Options *o, const Options *was) {
    options_print_changes(&o->set, &was->set, options_of_a_start, stdout);
}

// ---- --resume -----------------------------------------------------------------------------------

enum { BASE_FULL, BASE_NF4 };

// Exits when the command line asks for adapters of another shape than those of the checkpoint.
static void check_lora_kept(const Options *o, const Options *was, const char *dir) {
    if (was->lora == o->lora &&
        (o->lora == 0 || (was->lora_alpha == o->lora_alpha && was->base == o->base &&
                          strcmp(was->lora_targets, o->lora_targets) == 0)))
        return;
    exit_with(EXIT_CHECKPOINT_MISFIT, "leave these options out: a resumed run keeps its adapters",
              "%s: expected --lora %d --lora-alpha %g --lora-targets %s --base %s, found others",
              dir, was->lora, (double)was->lora_alpha, was->lora_targets,
              was->base == BASE_NF4 ? "nf4" : "full");
}

// Options that are not on the command line become those of the run whose checkpoint is resumed.
static void take_options(Options *o, Options *was, const char *checkpoint) {
    must(run_options_read(was, checkpoint, &err));
    options_take(&o->set, &was->set, options_of_a_start);
    if (is_given(o, "steps") && !is_given(o, "epochs")) o->epochs = 0;
    check_lora_kept(o, was, checkpoint);
    if (is_given(o, "train-on") && !is_given(o, "train"))
        exit_with(EXIT_USAGE, "leave it out, or give --train and another --out",
                  "--train-on: expected as in %s, whose texts are tokens already", checkpoint);
}

static bool model_is_builtin(const Options *o) {
    return llama_config_builtin(&(LlamaConfig){0}, o->model);
}

// ---- The learning rate and weight decay that suit what is trained -------------------------------

typedef struct {
    const char *what;
    float lr, weight_decay;
} Rates;

// Preferences: 5e-7 for given weights, as the code of DPO's authors has it, and 5e-6 for adapters
static Rates default_rates(const Options *o) {
    Rates r = {"given weights", 2e-5f, 0};
    if (o->from_scratch || model_is_builtin(o)) r = (Rates){"random weights", 2e-3f, 0.1f};
    if (o->lora > 0) r = (Rates){"adapters", 2e-4f, 0};
    if (o->preference) r.lr /= 40;
    return r;
}

static void choose_rates(Options *o, bool resumes) {
    const Rates usual = default_rates(o);
    const bool own_lr = is_given(o, "lr");
    if (!own_lr && !resumes) o->lr = usual.lr;
    if (!is_given(o, "weight-decay") && !resumes) o->weight_decay = usual.weight_decay;
    if (own_lr && o->lr > 20 * usual.lr)
        warning("--lr %g is %.0f times the default for %s, %g", (double)o->lr,
                (double)(o->lr / usual.lr), usual.what, (double)usual.lr);
}

void run_options_set_length(Options *o, RunLength length) {
    o->length = length;
    o->steps = length.steps;
    if (o->warmup_steps < 0) o->warmup_steps = o->steps / 10 < 20 ? o->steps / 10 : 20;
    if (length.epochs > 20 && !o->compare && !o->check_packing)
        warning("%ld step%s: %.0f epochs of %ld document%s; --epochs 3 is usual", o->steps,
                text_plural(o->steps), length.epochs, length.num_docs,
                text_plural(length.num_docs));
}

void run_options_print(const Options *o) {
    const Rates usual = default_rates(o);
    printf("lr      %g, weight decay %g; the defaults for %s are %g and %g\n", (double)o->lr,
           (double)o->weight_decay, usual.what, (double)usual.lr, (double)usual.weight_decay);
    if (o->length.epochs > 0)  // rounded down: 1.00 are all documents
        printf("epochs  %.2f%s%s in %ld step%s\n", floor(100 * o->length.epochs) / 100,
               o->length.source ? " of " : "", o->length.source ? o->length.source : "", o->steps,
               text_plural(o->steps));
    if (o->save_every < 0)
        printf("saves   every %d minutes of training, and after the last step", SAVE_MINUTES);
    else if (o->save_every > 0 && o->save_every < o->steps)
        printf("saves   every %ld steps, and after the last one", o->save_every);
    else
        printf("saves   after the last step, none before it");
    printf("; Ctrl-C saves too\n");
}

// ---- Do they fit each other? --------------------------------------------------------------------

// Every rank needs at least one micro-batch of each step, ideally the same number.
static void check_ranks(const Options *o, int64_t ranks) {
    const int64_t micros = o->batch_tokens / o->micro_batch_tokens;
    char hint[80];
    if (ranks > 1 && (o->compare || o->check_packing))
        exit_with(EXIT_USAGE, "start one process without mpirun",
                  "--compare and --check-packing work with one rank only");
    if (micros >= ranks) return;
    snprintf(hint, sizeof hint, "start at most %ld, or a run with more --batch-tokens", micros);
    exit_with(EXIT_USAGE, hint,
              "%ld ranks: expected at least one micro-batch of a step for each, ideally the same "
              "number; found %ld (--batch-tokens / --micro-batch-tokens)",
              ranks, micros);
}

static void check_lora(const Options *o) {
    const bool more = o->lora_alpha > 0 || o->lora_merge || o->base != BASE_FULL ||
                      strcmp(o->lora_targets, "all") != 0;
    if (o->lora == 0 && more)
        exit_with(
            EXIT_USAGE,
            "--lora RANK trains adapters, for example --lora 16; --adapter DIR names old ones",
            "--lora-alpha, --lora-targets, --lora-merge and --base belong to adapters");
    if (o->lora == 0) return;
    if (o->from_scratch || model_is_builtin(o))
        exit_with(EXIT_USAGE, "give --model DIR, the directory of a trained model",
                  "--lora: expected a model with weights, found random ones");
    if (o->optimizer == OPTIMIZER_MUON)
        exit_with(EXIT_USAGE, "leave --optimizer out: AdamW trains adapters",
                  "--lora and --optimizer muon: expected at most one of them");
}

static void complete_preference(Options *o, bool resumes) {
    if (!o->preference &&
        (o->beta > 0 || o->gamma != 1 || o->label_smoothing > 0 || o->sft_weight > 0))
        exit_with(EXIT_USAGE, "add --preference dpo or simpo",
                  "--beta, --gamma, --label-smoothing and --sft-weight belong to --preference");
    if (!o->preference) return;
    if (o->layout == LAYOUT_ROWS || o->train_on != 0 ||
        (is_given(o, "long-docs") && o->long_docs != LONG_DROP))
        exit_with(EXIT_USAGE, "leave the others out",
                  "--preference: expected no --layout rows, --train-on all or --long-docs other "
                  "than drop: a pair is trained whole, on its answers, or not at all");
    o->long_docs = LONG_DROP;
    if (resumes) return;
    if (o->beta == 0) o->beta = o->preference == PREFERENCE_DPO ? 0.1f : 2;
    if (!is_given(o, "steps") && !is_given(o, "epochs")) o->epochs = 1;
}

// Before texts are made to shards
static void check_no_weights(const char *spec) {
    Sources sources;
    must(sources_parse(&sources, spec, &err));
    if (sources.n > 1)
        exit_with(EXIT_USAGE, "give a list without weights",
                  "%s: --eval reads every document once, expected no weights", spec);
    sources_free(&sources);
}

static void check_training(const Options *o, int num_ranks, bool resumes) {
    bool same = false;
    if (run_trains(o)) must(out_dir_is_outside_models(o->out, &err));
    if (o->val) must(path_is_same(o->val, o->train, &same, &err));
    if (same) warning("--val is --train: its loss says nothing about other texts");
    if (o->overwrite && !model_is_builtin(o))
        must(out_dir_keeps_model(o->out, "model", o->model, &err));
    if (o->ledger && o->ledger[0])
        exit_with(EXIT_USAGE, "give --ledger alone, or --eval too",
                  "--ledger=%s: a run writes ledger.bin into --out", o->ledger);
    if (o->micro_batch_tokens < (o->preference ? 2 : 1) * o->max_seqlen)
        exit_with(EXIT_USAGE, "raise it, or lower --max-seqlen",
                  "--micro-batch-tokens %d: expected at least %s--max-seqlen %d: a %s must fit",
                  o->micro_batch_tokens, o->preference ? "twice " : "", o->max_seqlen,
                  o->preference ? "pair" : "document");
    if (o->batch_tokens % o->micro_batch_tokens != 0)
        exit_with(resumes ? EXIT_CHECKPOINT_MISFIT : EXIT_USAGE,
                  resumes ? "leave both out: a resumed run keeps the size of its steps"
                          : "4Ki is 4096, 4k is 4000; 0 is one micro-batch a rank",
                  "--batch-tokens %ld: expected a multiple of --micro-batch-tokens %d",
                  o->batch_tokens, o->micro_batch_tokens);
    check_ranks(o, num_ranks);
}

// The model that adapters name, unless --model is given
static void find_base_model(Options *o) {
    char *base = options_memory(&o->set, IO_PATH_MAX);
    must(lora_config_read(&o->adapters, base, o->adapter, &err));
    if (!is_given(o, "base")) o->base = o->adapters.nf4 ? BASE_NF4 : BASE_FULL;
    o->adapters.nf4 = o->base == BASE_NF4;
    if (o->overwrite) must(out_dir_keeps_model(o->out, "adapter", o->adapter, &err));
    const bool given = is_given(o, "model"), found = path_exists(base);
    bool same = true;
    if (given && found) must(path_is_same(base, o->model, &same, &err));
    if (!same) warning("%s: trained beside %s, found --model %s", o->adapter, base, o->model);
    if (!base[0] || given) return;
    o->model = base;
    if (!found)
        exit_with(EXIT_BAD_INPUT, "--model DIR says where it is; hf download gets it from the hub",
                  "%s: expected its base model %s, not found", o->adapter, base);
}

// Training continues them. A resumed run finds them in its checkpoint, and their shape in options.
static void take_adapter(Options *o) {
    char *targets = options_memory(&o->set, 80);
    find_base_model(o);
    if (!is_given(o, "train"))
        exit_with(EXIT_USAGE, "give --train TEXTS; --generate, --eval and --lora-merge use them",
                  "--adapter: expected --train, to train the adapters further");
    for (int t = 0; t < LORA_TARGETS; t++)
        if (o->adapters.target[t])
            snprintf(strchr(targets, 0), 12, "%s%s", targets[0] ? "," : "", lora_target_names[t]);
    if ((o->lora > 0 && o->lora != o->adapters.rank) ||
        (o->lora_alpha > 0 && o->lora_alpha != o->adapters.alpha) ||
        (strcmp(o->lora_targets, "all") != 0 && strcmp(o->lora_targets, targets) != 0))
        exit_with(EXIT_USAGE, "leave them out; without --adapter they make new adapters",
                  "--adapter: expected no other --lora, --lora-alpha and --lora-targets than its "
                  "own: %d, %g, %s",
                  o->adapters.rank, (double)o->adapters.alpha, targets);
    o->lora = o->adapters.rank, o->lora_alpha = o->adapters.alpha, o->lora_targets = targets;
}

void run_options_complete(Options *o, Options *was, const char *checkpoint, int num_ranks) {
    const bool resumes = checkpoint[0];
    if (resumes) take_options(o, was, checkpoint);
    if (o->adapter && !resumes) take_adapter(o);
    check_lora(o);
    if (o->lora > 0)
        must(lora_config_make(&o->adapters, o->lora, o->lora_alpha, o->lora_targets, &err));
    o->adapters.nf4 = o->base == BASE_NF4;
    complete_preference(o, resumes);
    choose_rates(o, resumes);
    check_training(o, num_ranks, resumes);
}

bool run_merges(const Options *o) {
    return o->adapter && o->lora_merge && !o->resume && !is_given(o, "train");
}

void run_options_complete_inference(Options *o, int num_ranks) {
    if (o->adapter) find_base_model(o);
    if (!o->adapter && o->base != BASE_FULL)
        exit_with(EXIT_USAGE, "give --adapter DIR, or leave it out",
                  "--base nf4 works with --lora and --adapter only");
    const char *mode = o->eval ? "eval" : o->generate ? "generate" : "lora-merge";
    const char *other = options_given_besides(&o->set, o->eval       ? options_of_eval
                                                       : o->generate ? options_of_generate
                                                                     : options_of_merge);
    if (run_merges(o)) must(out_dir_is_outside_models(o->out, &err));
    if (run_merges(o) && o->overwrite) must(out_dir_keeps_model(o->out, "model", o->model, &err));
    if (other)
        exit_with(EXIT_USAGE, "leave one of them out", "--%s and --%s: expected at most one", mode,
                  other);
    if (model_is_builtin(o) && !o->from_scratch)
        exit_with(EXIT_USAGE, "give --model DIR, for example out/demo/final",
                  "--%s: expected a model with weights, found the name %s", mode, o->model);
    if (o->eval && !o->bench && !o->val && !is_given(o, "train"))
        exit_with(EXIT_USAGE, "give --val: texts, JSONL or shards",
                  "--eval: expected --val, --train or --bench, found none of them");
    if (o->ledger && (!o->ledger[0] || (!o->val && !is_given(o, "train"))))
        exit_with(EXIT_USAGE, "--eval --val DATA --ledger=FILE",
                  "--ledger: expected a file, and the data to evaluate");
    if (o->eval) check_no_weights(o->val ? o->val : o->train);
    if (!o->eval && num_ranks > 1)
        exit_with(EXIT_USAGE, "start one process without mpirun", "--%s works with one rank only",
                  mode);
}

// ---- What they mean together --------------------------------------------------------------------

int64_t run_lines_every(const Options *o) {
    if (o->log_every >= 0) return o->log_every;
    return terminal_width(stdout) > 0 && o->steps >= 200 ? o->steps / 100 : 1;
}

// 1 at the peak, 0 when the decay is complete; done in [0,1]: fraction of the decay completed.
static double schedule_left(int schedule, double done) {
    if (schedule == SCHEDULE_COSINE) return 0.5 + 0.5 * cos(3.14159265358979323846 * done);
    if (schedule == SCHEDULE_WSD_SQRT) return 1 - sqrt(done);
    return schedule == SCHEDULE_CONSTANT ? 1 : 1 - done;
}

float learning_rate(const Options *o, int64_t step) {
    if (step < o->warmup_steps)
        return (float)((double)o->lr * (double)(step + 1) / (double)o->warmup_steps);
    const bool wsd = o->schedule == SCHEDULE_WSD || o->schedule == SCHEDULE_WSD_SQRT;
    const double end = (double)o->steps, min = o->min_lr_frac;
    const double stable = wsd ? end * (1 - (double)o->decay_frac) : 0;
    const double start = fmax((double)o->warmup_steps, stable);
    const double done = fmin(fmax(((double)step - start) / fmax(end - start, 1), 0), 1);
    return (float)((double)o->lr * (min + (1 - min) * schedule_left(o->schedule, done)));
}

bool run_trains(const Options *o) {
    return o->steps > 0 && !o->dry_run && !o->compare && !o->check_packing;
}

bool reduces_deterministically(const Options *o) {
    return o->deterministic && !o->compare && !o->check_packing;
}

const char *weights_dir(const Options *o, const char *checkpoint) {
    if (checkpoint[0]) return checkpoint;
    if (o->lora > 0 || o->adapter) return o->adapter;
    return o->from_scratch || model_is_builtin(o) ? NULL : o->model;
}
