#include "crc32.h"

void crc32_begin(struct crc32 *crc) {
  crc->value = 0;
  for (uint32_t byte = 0; byte < 256; byte++) {
    uint32_t rest = byte;
    for (int bit = 0; bit < 8; bit++) rest = (rest >> 1) ^ (rest & 1 ? 0xedb88320u : 0);
    crc->table[0][byte] = rest;
  }
  for (int k = 1; k < 8; k++) /* what a byte leaves behind after k bytes of zeros */
    for (int byte = 0; byte < 256; byte++)
      crc->table[k][byte] = (crc->table[k - 1][byte] >> 8) ^ crc->table[0][crc->table[k - 1][byte] & 255];
}

/* Eight bytes at a time: the eight look-ups do not wait for each other. */
void crc32_add(struct crc32 *crc, const void *bytes, size_t n) {
  const uint8_t *p = bytes;
  uint32_t value = ~crc->value;
  for (; n >= 8; n -= 8, p += 8) {
    value ^= (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
    value = crc->table[7][value & 255] ^ crc->table[6][(value >> 8) & 255] ^ crc->table[5][(value >> 16) & 255] ^
            crc->table[4][value >> 24] ^ crc->table[3][p[4]] ^ crc->table[2][p[5]] ^ crc->table[1][p[6]] ^
            crc->table[0][p[7]];
  }
  for (; n > 0; n--) value = (value >> 8) ^ crc->table[0][(value ^ *p++) & 255];
  crc->value = ~value;
}
