/* The value and derivative of each scalar activation. */
#ifndef PMOEI_ACTIVATION_MATH_H
#define PMOEI_ACTIVATION_MATH_H
#include "core/vmath_act.h"

PMOEI_SHARED float pmoei_gelu(float h, float *slope) {
  float density, normal = pmoei_normal(h, &density);
  *slope = normal + h * density;
  return h * normal;
}

PMOEI_SHARED float pmoei_gelu_tanh(float h, float *slope) { /* (1 + tanh u) / 2 is the sigmoid of 2u */
  const float a = 1.595769122f, b = 0.071354816f;           /* 2 sqrt(2/pi), and 0.044715 times it */
  float s = pmoei_sigmoid(h * (a + b * h * h));
  *slope = s + h * s * (1.0f - s) * (a + 3.0f * b * h * h);
  return h * s;
}

PMOEI_SHARED float pmoei_relu(float h, float *slope) { /* NaN goes through */
  *slope = h > 0.0f ? 1.0f : h <= 0.0f ? 0.0f : h;
  return h < 0.0f ? 0.0f : h;
}

PMOEI_SHARED float pmoei_silu(float h, float *slope) {
  float s = pmoei_sigmoid(h);
  *slope = s + h * s * (1.0f - s);
  return h * s;
}

#endif
