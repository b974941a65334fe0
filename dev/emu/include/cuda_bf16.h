// bf16 as the upper half of an fp32: conversions round to nearest even, NaN becomes 0x7fff.
#pragma once
#include "cuda_emu.h"

extern "C++" {
struct __nv_bfloat16 {
    uint16_t x;
    __nv_bfloat16() = default;
    __nv_bfloat16(float f) {
        uint32_t u = emu::bits<uint32_t>(f);
        bool nan = (u & 0x7fffffffu) > 0x7f800000u;
        x = nan ? (uint16_t)0x7fff : (uint16_t)((u + 0x7fffu + (u >> 16 & 1)) >> 16);
    }
    operator float() const { return emu::bits<float>((uint32_t)x << 16); }
};
struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

inline __nv_bfloat16 __float2bfloat16(float f) { return f; }
inline float __bfloat162float(__nv_bfloat16 b) { return b; }
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {a, b}; }
inline float2 __bfloat1622float2(__nv_bfloat162 a) { return {a.x, a.y}; }
}
