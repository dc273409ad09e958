/* CRC-32 as in zlib, gzip and PNG (reflected polynomial edb88320). */
#ifndef LM_CRC32_H
#define LM_CRC32_H
#include <stddef.h>
#include <stdint.h>

struct crc32 {
  uint32_t value; /* of the bytes so far */
  uint32_t table[8][256];
};

void crc32_begin(struct crc32 *crc);
void crc32_add(struct crc32 *crc, const void *bytes, size_t n);

#endif
