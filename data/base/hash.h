// Hashes: CRC32C of files, FNV-1a of small things.
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

// ------------------------------------------------------------------------------------------------
// FNV-1a, 64 bits: tells small things apart

#define FNV_START 14695981039346656037ull

// Continues a hash: start with FNV_START.
uint64_t fnv1a(uint64_t hash, const void *data, size_t n);

#endif
