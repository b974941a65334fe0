#include "run_options.h"

#include <math.h>
#include <string.h>

#include "../base/json.h"
#include "../base/memory.h"
#include "../shards/sources.h"
#include "checkpoint_files.h"

static Options parsed;

Option run_option_table[] = {
    OPTION_GROUP("model"),
    DIRECTORY("model", parsed.model, "demo",
              "Hugging Face directory, or a built-in name: demo, smollm2-135m, smollm2-360m, "
              "smollm2-1.7b, llama-3.2-1b, llama-3.2-3b, llama-3.1-8b"),
    FLAG("from-scratch", parsed.from_scratch, "random weights (always so for a built-in name)"),
    NUMBER("lora", parsed.lora, "0", 0, 1024,
           "train LoRA adapters of this rank while the model stays frozen; 0: train the model"),
    NUMBER("lora-alpha", parsed.lora_alpha, "0", 0, 1e6,
           "scale adapters by alpha / rank; 0: twice the rank"),
    TEXT("lora-targets", parsed.lora_targets, "all",
         "linear layers with adapters: all, or some of q,k,v,o,gate,up,down"),
    FLAG("lora-merge", parsed.lora_merge,
         "write the whole model to final/, with the adapters added, instead of the adapters alone"),
    CHOICE("base", parsed.base, "full", "full|nf4",
           "--lora, --adapter: keep the frozen matrices of layers as they are, or in 4 bits (NF4, "
           "like QLoRA); an adapter's default is what it was trained beside"),
    DIRECTORY("adapter", parsed.adapter, NULL,
              "LoRA adapters, beside --model or else the base model that they name: trained "
              "further with --train, or used by --generate and --eval, or merged by --lora-merge"),
    OPTION_GROUP("data"),
    DIRECTORY(
        "train", parsed.train, "data/demo",
        "training data: a directory, file or glob; shards, or texts (.txt, .jsonl, a directory of "
        "them), which are tokenized once into --out; web:0.7,code:0.3 is a mixture by tokens"),
    DIRECTORY(
        "val", parsed.val, NULL,
        "validation shards or texts; default: the val shards of --train, or 1 % of its texts"),
    CHOICE("train-on", parsed.train_on, "assistant", "assistant|all",
           "which turns of a chat to train on"),
    CHOICE("invalid-utf8", parsed.invalid_utf8, "refuse", "refuse|replace",
           "texts of which more than 1 byte in 1,000 is not UTF-8"),
    CHOICE("layout", parsed.layout, "packed", "packed|padded|rows|repad|shared",
           "how documents fill a batch"),
    NUMBER("max-seqlen", parsed.max_seqlen, "1024", 1, 1 << 24,
           "longest piece of a document; row length of the other layouts"),
    NUMBER("micro-batch-tokens", parsed.micro_batch_tokens, "4096", 1, 1 << 29,
           "capacity of the 1D token buffer"),
    NUMBER("batch-tokens", parsed.batch_tokens, "0", 0, 1e12,
           "capacity of one optimizer step, a multiple of --micro-batch-tokens; 0: one micro-batch "
           "a rank"),
    NUMBER("fill", parsed.fill, "0", 0, 1,
           "fraction of a step's capacity to use at most, beyond the documents that fit at any "
           "length; 0: 1 for one micro-batch a step, else 0.97"),
    CHOICE("long-docs", parsed.long_docs, "split", "split|truncate|drop|error",
           "documents longer than --max-seqlen"),
    NUMBER(
        "boundary-token", parsed.boundary_token, "-1", -1, 1 << 30,
        "llm.c's shards: the token that begins each document; -1: 50256, or 128000 of 32-bit ids"),
    FLAG("allow-other-tokenizer", parsed.allow_other_tokenizer,
         "train on shards that were not made with the model's tokenizer.json"),
    OPTION_GROUP("run"),
    DIRECTORY("out", parsed.out, "out/demo", "directory of log.jsonl, checkpoints and final/"),
    TEXT("options", parsed.options, NULL,
         "read options from a file, one a line (lr 1e-4), such as RUN/options, which each run "
         "writes; those of the command line win"),
    OPTION("resume", OPTION_DIRECTORY, &parsed.resume, NULL, "newest", 0, 0,
           "continue from a checkpoint (without DIR: the newest valid one in --out) with that "
           "run's options; options given here override them. Together with --train it starts the "
           "run where there is no checkpoint yet"),
    FLAG("overwrite", parsed.overwrite,
         "replace the run in --out: its checkpoints, final/ and log are removed"),
    NUMBER("steps", parsed.steps, "300", 0, 1e12,
           "optimizer steps; 0: validate, print samples, and write no checkpoint or log"),
    NUMBER("epochs", parsed.epochs, "0", 0, 1e6,
           "instead of --steps: train this often on all documents, such as 3 or 0.5; of a mixture, "
           "on each source at least this often"),
    NUMBER("seed", parsed.seed, "1", 0, 1e15, "of initial weights, document order and samples"),
    NUMBER("log-every", parsed.log_every, "-1", -1, 1e12,
           "steps between lines; 0: none; -1: one line a step, on a terminal about 100 a run and "
           "the latest step below them"),
    NUMBER("save-every", parsed.save_every, "-1", -1, 1e12,
           "steps between checkpoints; -1: one every ten minutes; 0: only at the end"),
    NUMBER("keep", parsed.keep, "2", 0, 1e6, "newest checkpoints kept; 0: all"),
    CHOICE("final-dtype", parsed.final_dtype, "fp32", MODEL_DTYPES,
           "of the weights in final/; checkpoints are fp32"),
    NUMBER("val-every", parsed.val_every, "50", 0, 1e12,
           "steps between validations, the first before training, the last after it; 0: never"),
    NUMBER("val-tokens", parsed.val_tokens, "65536", 1, 1e12,
           "validate on at most this many tokens, always the same whole documents"),
    TEXT("bench", parsed.bench, NULL,
         "multiple choice, files or globs of JSON Lines: accuracy before and after training, every "
         "--val-every steps, and by --eval, where --log-every 1 prints all scores"),
    OPTION_GROUP("optimizer"),
    CHOICE("optimizer", parsed.optimizer, "adamw", "adamw|muon",
           "optimizer of the layers' matrices; muon needs half the state and takes the same --lr; "
           "everything else uses AdamW"),
    CHOICE("moments", parsed.moments, "fp32", MODEL_DTYPES,
           "dtype of the optimizer's moments, in memory and in checkpoints; bf16, with stochastic "
           "rounding, saves 4 bytes a parameter; --resume converts them"),
    NUMBER("lr", parsed.lr, NULL, 0, 1e30,
           "peak learning rate; default: 2e-3 for random weights, 2e-5 for those of --model, 2e-4 "
           "for --lora"),
    CHOICE("schedule", parsed.schedule, "wsd", SCHEDULE_NAMES,
           "wsd: stable, then decay over the last --decay-frac, linear or 1-sqrt"),
    NUMBER("warmup-steps", parsed.warmup_steps, "-1", -1, 1e12,
           "linear from 0; -1: 20, but at most a tenth of the run"),
    NUMBER("decay-frac", parsed.decay_frac, "0.2", 0, 1, "share of the steps that wsd decays over"),
    NUMBER("min-lr-frac", parsed.min_lr_frac, "0", 0, 1, "the decay ends at this share of --lr"),
    NUMBER("weight-decay", parsed.weight_decay, NULL, 0, 1e6,
           "on matrices, not on norm weights; default: 0.1 for random weights, else 0"),
    NUMBER("grad-clip", parsed.grad_clip, "1", 0, 1e30, "largest gradient norm; 0: no clipping"),
    OPTION_GROUP("samples"),
    NUMBER("sample-every", parsed.sample_every, "0", 0, 1e12,
           "steps between samples; 0: only at the end"),
    NUMBER("num-samples", parsed.num_samples, "3", 0, 64,
           "texts written each time, packed into one batch where they fit; 0: none"),
    NUMBER("sample-tokens", parsed.sample_tokens, "128", 1, 1 << 20,
           "tokens written per text, also by --generate"),
    TEXT("prompt", parsed.prompt, NULL,
         "how each text begins, or @FILE with one per line for --generate; default: the beginnings "
         "of validation documents"),
    NUMBER("temperature", parsed.temperature, "0.8", 0, 100, "0: always the likeliest token"),
    NUMBER("top-p", parsed.top_p, "0.95", 0, 1, "sample from the likeliest that sum to p"),
    OPTION_GROUP("machine"),
    NUMBER("threads", parsed.threads, "0", 0, 4096, "CPU threads; 0: all cores"),
    FLAG("bf16-matmul", parsed.bf16_matmul,
         "CPU: matmul inputs in bf16, sums in fp32; the start says where that is faster"),
    TEXT("attention", parsed.attention, "auto",
         "attention kernels: auto; CUDA: sm80, sm90; CPU: avx512, avx2, portable"),
    NUMBER("memory-gib", parsed.memory_gib, "0", 0, 1e6,
           "device memory to plan for, with --dry-run also that of another machine; 0: all that is "
           "free"),
    FLAG("deterministic", parsed.deterministic,
         "same bits in every run (the CPU always does) and on any number of ranks; takes memory "
         "for sums over micro-batches in a fixed order"),
    CHOICE("recompute", parsed.recompute, "auto", "off|on|full|auto",
           "activations that backward computes again instead of keeping, for the same bits: none, "
           "norms and SwiGLU, or whole layers; auto: as little as fits into memory"),
    NUMBER("replay-every", parsed.replay_every, "0", 0, 1 << 30,
           "every N steps, compute the gradients twice before the step and compare all bits: finds "
           "faulty memory, cores and GPUs; 0: never"),
    NUMBER("heartbeat-seconds", parsed.heartbeat_seconds, "60", 0, 1e6,
           "several ranks: seconds without progress before a rank is reported and the run ends "
           "with exit code 8; 0: never"),
    OPTION_GROUP("instead of training"),
    FLAG("generate", parsed.generate,
         "continue --prompt, or read standard input; in a terminal, type one prompt per line"),
    FLAG("chat", parsed.chat,
         "--generate: treat prompts as messages of a chat, in the model's chat template (or "
         "ChatML)"),
    FLAG("eval", parsed.eval,
         "loss and perplexity on every document of --val, or of --train, by document length"),
    OPTION("compare", OPTION_INT, &parsed.compare, NULL, "3", 1, 1000,
           "time all layouts on the same documents, N steps of each"),
    OPTION("check-packing", OPTION_STRING, &parsed.check_packing, NULL, "", 0, 0,
           "packed against each document alone; with a file name: also writes what "
           "dev/referee.py holds other trainers to"),
    FLAG("dry-run", parsed.dry_run,
         "print the plan and the memory, and stop; to time a step, use --compare 1"),
    // options of other trainers
    HINT("num-epochs|num-train-epochs|n-epochs", "it is --epochs"),
    HINT("max-steps|num-iterations|max-iters|training.steps|-x", "it is --steps"),
    HINT("learning-rate|optimizer.lr|-l", "it is --lr"),
    HINT("output-dir|job.dump-folder|-o", "it is --out"),
    HINT("base-model|model-name-or-path|pretrained|model-path|hf-repo|-m|-e", "it is --model"),
    HINT("tokenizer|tokenizer-name|tokenizer-path", "it is the tokenizer of --model"),
    HINT("config|config-file|job.config-file", "it is --options FILE, with one option a line"),
    HINT("depth|layers|num-layers|n-layer|hidden-size|heads|num-heads",
         "--model's config.json has the sizes"),
    HINT("max-seq-length|max-seq-len|max-length|seq-len|sequence-len|seq-length|sequence-length|"
         "ctx-size|context-length|block-size|training.seq-len|-t|-c",
         "it is --max-seqlen"),
    HINT("warmup|warmup-ratio|warmup-iters|lr-scheduler.warmup-steps|-u", "it is --warmup-steps"),
    HINT("lr-scheduler|lr-scheduler-type", "it is --schedule"),
    HINT("max-grad-norm|clip-grad", "it is --grad-clip"),
    HINT("eval-steps|eval-interval|eval-every|val-loss-every|eval-strategy", "it is --val-every"),
    HINT("quiet|silent|verbose|disable-tqdm", "--log-every 0 prints no steps"),
    HINT("resume-from-checkpoint", "it is --resume[=DIR]"),
    HINT("optim|optimizer.name", "it is --optimizer: adamw or muon"),
    HINT("dropout|attention-dropout|lora-dropout", "there is no dropout: leave it out"),
    HINT("label-smoothing", "there is no label smoothing: leave it out"),
    HINT("packing|sample-packing|eval-packing",
         "it is the default; --layout padded and --compare show the others"),
    HINT("amp|dtype|torch-dtype|fp16|bf16|precision|mixed-precision",
         "CUDA computes in bf16 with exact fp32 weights, the CPU in fp32"),
    HINT("cuda|device|gpu|gpus|num-gpus|nproc-per-node",
         "a rank has one GPU: mpirun -n 4 takes four, CUDA_VISIBLE_DEVICES chooses"),
    HINT("target-modules|lora-target-modules", "it is --lora-targets"),
    HINT("attn-implementation|flash-attention|flash-attn",
         "attention is varlen in every layout; --attention chooses the kernels"),
    HINT("gradient-checkpointing|activation-checkpointing",
         "it is --recompute full; --dry-run prints what activations take"),
    HINT("assistant-only-loss|completion-only-loss|train-on-inputs|mask-prompt",
         "the loss is on the answers; --train-on all trains every turn"),
    HINT("workers|num-workers|num-proc|cpu-threads", "it is --threads"),
    HINT("cpu|use-cpu|no-cuda|-ngl", "make BACKEND=cpu or BACKEND=cuda chooses the device"),
    HINT("list-models", "--help model lists the built-in names"),
    HINT("-v", "--log-every 1 prints each step; llm.c's -v is --val-every"),
    HINT("export|export-type|export-gguf",
         "scripts/export_gguf.py DIR MODEL.gguf writes llama.cpp's format"),
    HINT("prompt-file|file|-f", "it is --prompt @FILE, one prompt per line"),
    HINT("-p", "it is --prompt"),
    HINT("temp", "it is --temperature"),
    HINT("conversation|interactive|-cnv", "it is --generate --chat"),
    HINT("save-total-limit", "it is --keep"),
    HINT("zero|fsdp|deepspeed|zero-stage", "several ranks always shard the optimizer state"),
    HINT("beta1|beta2|adam-beta1|adam-beta2|eps|adam-epsilon",
         "AdamW's betas are 0.9 and 0.95, its eps 1e-8"),
    HINT("top-k", "--top-p cuts unlikely tokens off"),
    HINT("max-new-tokens|max-tokens|n-predict|-n", "it is --sample-tokens"),
    // families, after the names above
    HINT("batch*|micro-batch-size|device-batch-size|grad-accum*|per-device-train-batch-size|"
         "gradient-accumulation-steps|total-batch-size|"
         "training.local-batch-size|training.global-batch-size|-b|-d",
         "--batch-tokens counts a step in tokens, --micro-batch-tokens one pass through the model"),
    HINT("dataset*|data|data-path|train-file|input-bin|training.dataset|-i",
         "it is --train: text files, JSONL or shards"),
    HINT("val*|eval*|input-val-bin|-j", "it is --val FILE, with --val-every and --val-tokens"),
    HINT("save*|checkpoint*", "it is --save-every, with --keep"),
    HINT("log*|metrics.log-freq", "it is --log-every"),
    HINT("lora*|peft*|use-peft|use-dora|rslora|dora",
         "it is --lora RANK, with --lora-alpha, --lora-targets and --lora-merge; --adapter DIR "
         "trains adapters further"),
    HINT("qlora|load-in*|quant*|bnb*", "it is --lora RANK --base nf4"),
    HINT("wandb*|tensorboard*|report-to|run-name",
         "scripts/follow_run.py copies the log of a run there, also while it grows"),
    HINT("chat-template*", "chats are rendered by the template of --model, or ChatML"),
    HINT("push-to-hub|hub*", "hf upload ORG/NAME RUN/final, of the package huggingface_hub"),
    HINT("dpo*|grpo*|ppo*|kto*|orpo*|reward*", "there is no preference training: TRL has it"),
    HINT("muon*", "it is --optimizer muon, with AdamW's --lr"),
    HINT("merge*", "it is --lora-merge"),
    HINT("compile*|torch-compile", "there is nothing to compile at run time"),
    OPTION_END,
};

static const char usage[] =
    "./train_llama --model DIR --train TEXTS --out RUN [options]\n"
    "       ./train_llama --resume --out RUN                          resumes after Ctrl-C\n"
    "       ./train_llama --model RUN/final --generate [--chat]       prompts from the terminal";

// What most runs need, for --help
static const char options_of_help[] =
    "model|train|val|out|resume|overwrite|max-seqlen|micro-batch-tokens|batch-tokens|steps|lr|"
    "epochs|options|save-every|log-every|compare|prompt|generate|chat|dry-run";

// What --resume does not take from the run it continues: options of this start and this machine.
const char run_options_of_a_start[] =
    "options|out|resume|overwrite|log-every|threads|memory-gib|heartbeat-seconds|compare|"
    "check-packing|generate|chat|eval|dry-run";

static const char options_of_generate[] =
    "options|generate|prompt|chat|sample-tokens|temperature|top-p|seed|model|from-scratch|"
    "max-seqlen|micro-batch-tokens|threads|memory-gib|bf16-matmul|attention|adapter|base|dry-run";
static const char options_of_eval[] =
    "options|eval|train|val|bench|log-every|train-on|invalid-utf8|long-docs|boundary-token|"
    "allow-other-tokenizer|seed|model|adapter|base|from-scratch|max-seqlen|micro-batch-tokens|"
    "threads|memory-gib|bf16-matmul|attention|heartbeat-seconds|dry-run";

static const char options_of_merge[] =
    "options|adapter|lora-merge|model|out|overwrite|final-dtype|threads|memory-gib|dry-run";

Options *run_options_parse(int argc, char **argv, const char *version, int num_ranks) {
    Options *o = &parsed;
    options_parse_or_exit(run_option_table, argc, argv, usage, options_of_help, version);
    char *out = host_copy(o->out, "a path");
    for (size_t n = strlen(out); n > 1 && out[n - 1] == '/';) out[--n] = 0;
    o->out = out;
    if (o->chat && !o->generate)
        exit_with(EXIT_USAGE, "add --generate, or leave it out", "--chat belongs to --generate");
    const OptionGiver steps = option_given(run_option_table, "steps"),
                      epochs = option_given(run_option_table, "epochs");
    if (steps > epochs) o->epochs = 0;  // the command line wins
    if (steps && steps == epochs)
        exit_with(EXIT_USAGE, "leave one of them out",
                  "--steps and --epochs: expected at most one of them");
    if (option_given(run_option_table, "warmup-steps") && o->steps > 0 &&
        o->warmup_steps >= o->steps)
        warning("--warmup-steps %ld, --steps %ld: the run never reaches --lr", o->warmup_steps,
                o->steps);
    const bool own_buffer = option_given(run_option_table, "micro-batch-tokens");
    if ((o->generate || o->eval || !own_buffer) && o->micro_batch_tokens < o->max_seqlen)
        o->micro_batch_tokens = o->max_seqlen;
    if (o->batch_tokens == 0) o->batch_tokens = (int64_t)o->micro_batch_tokens * num_ranks;
    return o;
}

void run_options_write(const char *log, bool resumed) {
    char dir[IO_PATH_MAX], path[IO_PATH_MAX], except[320];
    snprintf(except, sizeof except, "%s|%s", run_options_of_a_start,
             resumed || parsed.epochs == 0 ? "epochs" : "steps");
    must(path_parent(dir, log, &err) && path_join(path, dir, "options", &err) &&
         options_write(run_option_table, except, resumed, path, &err));
}

enum { BASE_FULL, BASE_NF4 };
static const char *const bases[] = {"full", "nf4"};

// Adapters of another rank or beside other layers are other tensors than the run's; another alpha
// would scale what they have learned, and another base is another model.
static void check_lora_kept(const json_t *stored, const char *dir) {
    char hint[256];
    const int rank = (int)json_number_value(json_object_get(stored, "lora"));
    const float alpha = (float)json_number_value(json_object_get(stored, "lora-alpha"));
    const char *targets = json_string_value(json_object_get(stored, "lora-targets"));
    const int base = json_string_is(json_object_get(stored, "base"), bases[BASE_NF4]);
    if (!targets) targets = "all";
    if (rank == parsed.lora && (rank == 0 || (alpha == parsed.lora_alpha && base == parsed.base &&
                                              strcmp(targets, parsed.lora_targets) == 0)))
        return;
    snprintf(hint, sizeof hint,
             "give --lora %d --lora-alpha %g --lora-targets %.160s --base %s, or leave them out",
             rank, alpha, targets, bases[base]);
    exit_with(EXIT_CHECKPOINT_MISFIT, hint,
              "%s: expected the adapters of this run, found --lora %d --lora-alpha %g "
              "--lora-targets %s --base %s",
              dir, parsed.lora, parsed.lora_alpha, parsed.lora_targets, bases[parsed.base]);
}

// Options that are not on the command line become those of the run whose checkpoint is resumed.
static json_t *take_options(const ResumePoint *at) {
    Error err = {0};
    if (!at->dir[0]) return NULL;
    json_auto_t *state = state_open(at->dir, &err);
    if (!state) error_exit(&err);
    json_t *stored = json_incref(json_object_get(state, "options"));
    must(options_take(run_option_table, stored, run_options_of_a_start, &err) ||
         error_prefix(&err, at->dir));
    if (option_given(run_option_table, "steps") && !option_given(run_option_table, "epochs"))
        parsed.epochs = 0;
    check_lora_kept(stored, at->dir);
    if (option_given(run_option_table, "train-on") && !option_given(run_option_table, "train"))
        exit_with(EXIT_USAGE, "leave it out, or give --train and another --out",
                  "--train-on: expected as in %s, whose texts are tokens already", at->dir);
    return stored;
}

static bool model_is_builtin(const Options *o) {
    return llama_config_builtin(&(LlamaConfig){0}, o->model);
}

// ---- The learning rate and weight decay that suit what is trained -------------------------------

typedef struct {
    const char *what;
    float lr, weight_decay;
} Rates;

static Rates default_rates(const Options *o) {
    if (o->lora > 0) return (Rates){"adapters", 2e-4f, 0};
    if (o->from_scratch || model_is_builtin(o)) return (Rates){"random weights", 2e-3f, 0.1f};
    return (Rates){"given weights", 2e-5f, 0};
}

static void choose_rates(Options *o, bool resumes) {
    const Rates usual = default_rates(o);
    const bool own_lr = option_given(run_option_table, "lr");
    if (!own_lr && !resumes) o->lr = usual.lr;
    if (!option_given(run_option_table, "weight-decay") && !resumes)
        o->weight_decay = usual.weight_decay;
    if (own_lr && o->lr > 20 * usual.lr)
        warning("--lr %g is %.0f times the default for %s, %g", (double)o->lr,
                (double)(o->lr / usual.lr), usual.what, (double)usual.lr);
}

void run_options_set_steps(int64_t steps, double epochs, const char *source, int64_t num_docs) {
    Options *o = &parsed;
    o->steps = steps;
    o->epochs_of_steps = epochs;
    o->epochs_of = source;
    if (o->warmup_steps < 0) o->warmup_steps = o->steps / 10 < 20 ? o->steps / 10 : 20;
    if (epochs > 20 && !o->compare && !o->check_packing)
        warning("%ld step%s: %.0f epochs of %ld document%s; --epochs 3 is usual", o->steps,
                text_plural(o->steps), epochs, num_docs, text_plural(num_docs));
}

void run_options_print(const Options *o) {
    const Rates usual = default_rates(o);
    printf("lr      %g, weight decay %g", (double)o->lr, (double)o->weight_decay);
    if (o->lr == usual.lr && o->weight_decay == usual.weight_decay)
        printf(": the defaults for %s\n", usual.what);
    else
        printf("; the defaults for %s are %g and %g\n", usual.what, (double)usual.lr,
               (double)usual.weight_decay);
    const double all = o->epochs_of_steps, epoch = (double)o->steps / all;
    if (all > 0)  // rounded down: 1.00 are all documents
        printf("epochs  %.*f%s%s in %ld step%s: about %.*f %s\n", all < 10 ? 2 : 0,
               all < 10 ? floor(100 * all) / 100 : floor(all), o->epochs_of ? " of " : "",
               o->epochs_of ? o->epochs_of : "", o->steps, text_plural(o->steps),
               epoch < 10 && epoch > 0.1, epoch < 1 ? 1 / epoch : epoch,
               epoch < 1 ? "epochs a step" : "steps an epoch");
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
static void check_ranks(const Options *o, int64_t ranks, bool resumes) {
    const int64_t micros = o->batch_tokens / o->micro_batch_tokens;
    char hint[160];
    if (ranks > 1 && (o->compare || o->check_packing))
        exit_with(EXIT_USAGE, "start one process without mpirun",
                  "--compare and --check-packing work with one rank only");
    if (micros >= ranks) return;
    if (resumes)
        snprintf(hint, sizeof hint, "start at most %ld: a resumed run keeps the size of its steps",
                 micros);
    else
        snprintf(hint, sizeof hint, "start fewer ranks, or give --batch-tokens a multiple of %ld",
                 ranks * o->micro_batch_tokens);
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
    if (o->micro_batch_tokens < o->max_seqlen)
        exit_with(EXIT_USAGE, "raise it, or lower --max-seqlen",
                  "--micro-batch-tokens %d: expected at least --max-seqlen %d: a document must fit",
                  o->micro_batch_tokens, o->max_seqlen);
    if (o->batch_tokens % o->micro_batch_tokens != 0)
        exit_with(resumes ? EXIT_CHECKPOINT_MISFIT : EXIT_USAGE,
                  resumes ? "leave both out: a resumed run keeps the size of its steps"
                          : "4Ki is 4096, 4k is 4000; 0 is one micro-batch a rank",
                  "--batch-tokens %ld: expected a multiple of --micro-batch-tokens %d",
                  o->batch_tokens, o->micro_batch_tokens);
    check_ranks(o, num_ranks, resumes);
}

// The model that adapters name, unless --model is given
static void find_base_model(Options *o) {
    static char base[IO_PATH_MAX];
    must(lora_config_read(&o->adapters, base, o->adapter, &err));
    if (!option_given(run_option_table, "base")) o->base = o->adapters.nf4 ? BASE_NF4 : BASE_FULL;
    o->adapters.nf4 = o->base == BASE_NF4;
    if (o->overwrite) must(out_dir_keeps_model(o->out, "adapter", o->adapter, &err));
    const bool given = option_given(run_option_table, "model"), found = path_exists(base);
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
    static char targets[80];
    find_base_model(o);
    if (!option_given(run_option_table, "train"))
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

json_t *run_options_complete(const ResumePoint *at, int num_ranks) {
    Options *o = &parsed;
    json_t *stored = take_options(at);
    if (o->adapter && !stored) take_adapter(o);
    check_lora(o);
    if (o->lora > 0)
        must(lora_config_make(&o->adapters, o->lora, o->lora_alpha, o->lora_targets, &err));
    o->adapters.nf4 = o->base == BASE_NF4;
    choose_rates(o, stored != NULL);
    check_training(o, num_ranks, stored != NULL);
    return stored;
}

bool run_merges(const Options *o) {
    return o->adapter && o->lora_merge && !o->resume && !option_given(run_option_table, "train");
}

void run_options_complete_inference(int num_ranks) {
    Options *o = &parsed;
    if (o->adapter) find_base_model(o);
    if (!o->adapter && o->base != BASE_FULL)
        exit_with(EXIT_USAGE, "give --adapter DIR, or leave it out",
                  "--base nf4 works with --lora and --adapter only");
    const char *mode = o->eval ? "eval" : o->generate ? "generate" : "lora-merge";
    const char *other = options_given_besides(run_option_table, o->eval       ? options_of_eval
                                                                : o->generate ? options_of_generate
                                                                              : options_of_merge);
    if (run_merges(o)) must(out_dir_is_outside_models(o->out, &err));
    if (run_merges(o) && o->overwrite) must(out_dir_keeps_model(o->out, "model", o->model, &err));
    if (other && !o->eval && !o->generate)
        exit_with(EXIT_USAGE, "leave it out, or give --train to train the adapters further",
                  "--%s has no effect where adapters are only merged", other);
    if (other)
        exit_with(EXIT_USAGE, "leave one of them out", "--%s and --%s: expected at most one", mode,
                  other);
    if (model_is_builtin(o) && !o->from_scratch)
        exit_with(EXIT_USAGE, "give --model DIR, for example out/demo/final",
                  "--%s: expected a model with weights, found the name %s", mode, o->model);
    if (o->eval && !o->bench && !o->val && !option_given(run_option_table, "train"))
        exit_with(EXIT_USAGE, "give --val: texts, JSONL or shards",
                  "--eval: expected --val, --train or --bench, found none of them");
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

bool replaces_run(const Options *o) { return run_trains(o) && o->overwrite; }

const char *weights_dir(const Options *o, const ResumePoint *at) {
    if (at->dir[0]) return at->dir;
    if (o->lora > 0 || o->adapter) return o->adapter;
    return o->from_scratch || model_is_builtin(o) ? NULL : o->model;
}
