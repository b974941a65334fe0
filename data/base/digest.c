#include "digest.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "error.h"
#include "file.h"

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

bool sha256_file(const char *path, unsigned char digest[32], Error *err) {
    uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    unsigned char bytes[1 << 14];
    enum { PADDING = 128, PART = sizeof bytes - PADDING };  // whole blocks
    File f;
    bool ok = file_open(&f, path, "", err), last = false;
    if (!ok) return false;
    for (uint64_t at = 0, n; ok && !last; at += n) {
        n = f.size_bytes - at < PART ? f.size_bytes - at : PART;
        ok = file_read_at(&f, bytes, n, at, err);
        last = n < PART;
        size_t end = n;
        if (last) {  // a one bit, zeros to the end of a block, and in its last bytes the bits read
            const uint64_t bits = __builtin_bswap64(f.size_bytes * 8);
            end = (n + 9 + 63) / 64 * 64;
            memset(bytes + n, 0, end - n);
            bytes[n] = 0x80;
            memcpy(bytes + end - 8, &bits, 8);
        }
        for (size_t i = 0; i < end; i += 64) sha256_block(state, bytes + i);
    }
    file_close(&f);
    for (int i = 0; i < 8; i++) state[i] = __builtin_bswap32(state[i]);
    memcpy(digest, state, sizeof state);
    return ok;
}
