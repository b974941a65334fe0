#include "hash.h"

#include <string.h>

// ---- CRC32C -------------------------------------------------------------------------------------

// table[k][b]: byte b followed by k zero bytes, so that eight look-ups process eight bytes.
static uint32_t crc32c_table[8][256];

__attribute__((constructor)) static void crc32c_make_table(void) {
    for (int k = 0; k < 8; k++)
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t c = k == 0 ? i : crc32c_table[k - 1][i];
            for (int bit = 0; bit < 8; bit++) c = (c >> 1) ^ (0x82f63b78u & (0u - (c & 1u)));
            crc32c_table[k][i] = c;
        }
}

uint32_t crc32c_portable(uint32_t crc, const unsigned char *p, size_t n) {
    for (; n >= 8; n -= 8, p += 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        word ^= crc;
        crc = 0;
        for (int k = 0; k < 8; k++) crc ^= crc32c_table[7 - k][(word >> (8 * k)) & 255];
    }
    for (; n; n--) crc = (crc >> 8) ^ crc32c_table[0][(crc ^ *p++) & 255];
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

// ---- Hashes for keys and tables -----------------------------------------------------------------

uint64_t splitmix64(uint64_t x) { return mix64(x + 0x9e3779b97f4a7c15ull); }

uint64_t fnv1a(uint64_t h, const void *data, size_t n) {
    const unsigned char *p = data;
    for (size_t i = 0; i < n; i++) h = (h ^ p[i]) * 1099511628211ull;
    return h;
}

// ---- SHA-256 ------------------------------------------------------------------------------------

static uint32_t rotate(uint32_t x, int n) { return x >> n | x << (32 - n); }

static void sha256_block(uint32_t state[8], const unsigned char *p) {
    static const uint32_t k[64] = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4,
        0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe,
        0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f,
        0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7,
        0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc,
        0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b,
        0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116,
        0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
        0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7,
        0xc67178f2};
    uint32_t w[64], v[8];
    memcpy(w, p, 64);
    for (int i = 0; i < 16; i++) w[i] = __builtin_bswap32(w[i]);
    for (int i = 16; i < 64; i++) {
        const uint32_t a = w[i - 15], b = w[i - 2];
        w[i] = w[i - 16] + (rotate(a, 7) ^ rotate(a, 18) ^ a >> 3) + w[i - 7] +
               (rotate(b, 17) ^ rotate(b, 19) ^ b >> 10);
    }
    memcpy(v, state, sizeof v);
    for (int i = 0; i < 64; i++) {
        const uint32_t a = v[0], e = v[4];
        const uint32_t t1 = v[7] + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) +
                            ((e & v[5]) ^ (~e & v[6])) + k[i] + w[i];
        const uint32_t t2 = (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) +
                            ((a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]));
        memmove(v + 1, v, 7 * sizeof *v);
        v[4] += t1;
        v[0] = t1 + t2;
    }
    for (int i = 0; i < 8; i++) state[i] += v[i];
}

// After the data a one bit, zeros to the end of a block, and in its last bytes the number of bits.
void sha256(const void *data, uint64_t n, unsigned char digest[32]) {
    uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    unsigned char end[128] = {0};
    const uint64_t whole = n / 64 * 64, size = n - whole < 56 ? 64 : 128,
                   bits = __builtin_bswap64(n * 8);
    const unsigned char *p = data;
    memcpy(end, p + whole, n - whole);
    end[n - whole] = 0x80;
    memcpy(end + size - 8, &bits, 8);
    for (uint64_t i = 0; i < whole; i += 64) sha256_block(state, p + i);
    for (uint64_t i = 0; i < size; i += 64) sha256_block(state, end + i);
    for (int i = 0; i < 8; i++) state[i] = __builtin_bswap32(state[i]);
    memcpy(digest, state, 32);
}
