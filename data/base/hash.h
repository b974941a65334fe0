// Hashes: CRC32C for files, mix64 for counter-based random numbers, FNV-1a for fingerprints and
// tables, SHA-256 for the names of tokenizers.
#pragma once

#include "error.h"

#if defined(BACKEND_CUDA) && defined(__cplusplus)
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

// CRC32C (Castagnoli) of n more bytes: start with crc = 0, pass the data in any number of parts.
// crc32c(0, "123456789", 9) == 0xe3069283.
uint32_t crc32c(uint32_t crc, const void *data, size_t n);

// The same without SSE4.2 and without the complements before and after; for crc32c and its test.
uint32_t crc32c_portable(uint32_t crc, const unsigned char *p, size_t n);

// splitmix64's finaliser: a bijection; every output bit depends on every input bit. mix64(0) == 0.
HOST_DEVICE static inline uint64_t mix64(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// The next output of a splitmix64 generator in state x: mix64 of x plus its constant.
uint64_t splitmix64(uint64_t x);

// FNV-1a of n more bytes: start with h = FNV1A_START, pass the data in any number of parts.
#define FNV1A_START 14695981039346656037ull
uint64_t fnv1a(uint64_t h, const void *data, size_t n);

// SHA-256 (FIPS 180-4) of n bytes.
void sha256(const void *data, uint64_t n, unsigned char digest[32]);
