// The trainer's own functions in a test: train_llama.cu without its main.
#ifndef UNPAD_TESTS_TRAINER_H
#define UNPAD_TESTS_TRAINER_H

#define main train_llama_main
#include "../train_llama.cu"
#undef main

#endif
