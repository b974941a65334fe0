// The self-check of the kernels, once for each GPU, driver and program.
#ifndef UNPAD_CHECK_KERNELS_H
#define UNPAD_CHECK_KERNELS_H

#include <stdbool.h>

// All ranks call it, with devices connected: they all check if one of them has not done so before,
// or if it is demanded, which is then thorough. Wrong kernels end the process with exit code 11.
// CPU: does nothing.
void check_kernels(bool demanded);

#endif
