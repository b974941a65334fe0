#include "hash.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

// ------------------------------------------------------------------------------------------------
// CRC32C

// table[k][b]: byte b followed by k zero bytes, so that eight look-ups process eight bytes.
static void crc32c_make_table(uint32_t table[8][256]) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int bit = 0; bit < 8; bit++) c = (c >> 1) ^ (0x82f63b78u & (0u - (c & 1u)));
        table[0][i] = c;
    }
    for (uint32_t i = 0; i < 256; i++)
        for (int k = 1; k < 8; k++)
            table[k][i] = (table[k - 1][i] >> 8) ^ table[0][table[k - 1][i] & 255];
}

uint32_t crc32c_portable(uint32_t crc, const unsigned char *p, size_t n) {
    static uint32_t table[8][256];
    static int ready;  // concurrent threads write the same values
    if (!__atomic_load_n(&ready, __ATOMIC_ACQUIRE)) {
        crc32c_make_table(table);
        __atomic_store_n(&ready, 1, __ATOMIC_RELEASE);
    }
    for (; n >= 8; n -= 8, p += 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        word ^= crc;
        crc = 0;
        for (int k = 0; k < 8; k++) crc ^= table[7 - k][(word >> (8 * k)) & 255];
    }
    for (; n; n--) crc = (crc >> 8) ^ table[0][(crc ^ *p++) & 255];
    return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) static uint32_t crc32c_sse42(uint32_t crc, const unsigned char *p,
                                                               size_t n) {
    uint64_t c = crc;
    for (; n >= 8; n -= 8, p += 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        c = __builtin_ia32_crc32di(c, word);
    }
    for (; n; n--) c = __builtin_ia32_crc32qi((uint32_t)c, *p++);
    return (uint32_t)c;
}
#endif

uint32_t crc32c(uint32_t crc, const void *data, size_t n) {
    const unsigned char *p = data;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("sse4.2")) return ~crc32c_sse42(~crc, p, n);
#endif
    return ~crc32c_portable(~crc, p, n);
}

// ------------------------------------------------------------------------------------------------
// Hashes for keys and tables

uint64_t mix64(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

uint64_t splitmix64(uint64_t x) { return mix64(x + 0x9e3779b97f4a7c15ull); }

uint64_t fnv1a(uint64_t h, const void *data, size_t n) {
    const unsigned char *p = data;
    for (size_t i = 0; i < n; i++) h = (h ^ p[i]) * 1099511628211ull;
    return h;
}
