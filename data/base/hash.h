// Hashes: CRC32C of files, and random numbers from a counter.
#ifndef UNPAD_HASH_H
#define UNPAD_HASH_H

#include <stddef.h>
#include <stdint.h>

// ------------------------------------------------------------------------------------------------
// CRC32C (Castagnoli), the checksum of shard indexes and checkpoint files

uint32_t crc32c_portable(uint32_t crc, const unsigned char *p, size_t n);

// Continues a checksum: start with 0, feed pieces in order.
// crc32c(0, "123456789", 9) == 0xe3069283.
uint32_t crc32c(uint32_t crc, const void *data, size_t n);

// Mixes all bits of a counter into a random-looking number (splitmix64's finalizer).
uint64_t hash64(uint64_t x);

#endif
