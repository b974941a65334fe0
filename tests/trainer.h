// Includes train_llama.cu without its main, so that a test can call the trainer's functions.
#pragma once

#define main train_llama_main
#define UNPAD_VERSION "of a test"
#include "../train_llama.cu"
#undef main
