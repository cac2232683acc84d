// The values of a part of a packed matrix, with the layout and the levels of src/numeric/nf4/.

TABLE float nf4_levels[16] = {
    -1.0f, -0.6961928f, -0.52507305f, -0.3949175f, -0.28444138f, -0.18477343f, -0.091050036f, 0.0f,
    0.0795803f, 0.1609302f, 0.2461123f, 0.33791524f, 0.44070983f, 0.562617f, 0.72295684f, 1.0f};

TABLE u32 nf4_magnitudes[127] = {
    0x3513a3b7u, 0x365a1a94u, 0x370205ffu, 0x37b24206u, 0x38378034u, 0x388aefb3u, 0x38ba1f4bu, 0x3923d70bu, 0x398ce705u, 0x39c7e283u,
    0x3a016f01u, 0x3a1eecc1u, 0x3a3c6a80u, 0x3a59e83eu, 0x3a7765ffu, 0x3aa7ef9du, 0x3af1a9fcu, 0x3b1db22du, 0x3b428f5cu, 0x3b676c8au,
    0x3b8624ddu, 0x3b989374u, 0x3bab020du, 0x3bbd70a4u, 0x3bcfdf3bu, 0x3be24dd3u, 0x3bf4bc6au, 0x3c039581u, 0x3c0ccccdu, 0x3c160418u,
    0x3c1f3b64u, 0x3c3ae148u, 0x3c68f5c3u, 0x3c8b851fu, 0x3ca28f5du, 0x3cb9999au, 0x3cd0a3d7u, 0x3ce7ae15u, 0x3cfeb852u, 0x3d0ae148u,
    0x3d166667u, 0x3d21eb85u, 0x3d2d70a3u, 0x3d38f5c3u, 0x3d447ae1u, 0x3d500000u, 0x3d5b851fu, 0x3d670a3du, 0x3d728f5du, 0x3d7e147bu,
    0x3d84cccdu, 0x3d8a8f5du, 0x3d9051ebu, 0x3d96147bu, 0x3d9bd70au, 0x3da1999au, 0x3da75c2au, 0x3dad1eb8u, 0x3db2e148u, 0x3db8a3d7u,
    0x3dbe6667u, 0x3dc428f7u, 0x3dc9eb85u, 0x3ddb3334u, 0x3df80000u, 0x3e0a6666u, 0x3e18cccdu, 0x3e273333u, 0x3e35999au, 0x3e440000u,
    0x3e526666u, 0x3e60cccdu, 0x3e6f3333u, 0x3e7d9999u, 0x3e860000u, 0x3e8d3334u, 0x3e946666u, 0x3e9b999au, 0x3ea2ccccu, 0x3eaa0000u,
    0x3eb13333u, 0x3eb86666u, 0x3ebf999au, 0x3ec6ccccu, 0x3ece0000u, 0x3ed53333u, 0x3edc6666u, 0x3ee3999au, 0x3eeaccccu, 0x3ef20000u,
    0x3ef93332u, 0x3f003333u, 0x3f03ccccu, 0x3f076666u, 0x3f0b0000u, 0x3f0e999au, 0x3f123334u, 0x3f15cccdu, 0x3f196666u, 0x3f1d0000u,
    0x3f20999au, 0x3f243334u, 0x3f27cccdu, 0x3f2b6666u, 0x3f2f0000u, 0x3f32999au, 0x3f363334u, 0x3f39cccdu, 0x3f3d6666u, 0x3f410000u,
    0x3f44999au, 0x3f483333u, 0x3f4bcccdu, 0x3f4f6666u, 0x3f530000u, 0x3f56999au, 0x3f5a3333u, 0x3f5dcccdu, 0x3f616666u, 0x3f650000u,
    0x3f68999au, 0x3f6c3333u, 0x3f6fcccdu, 0x3f736666u, 0x3f770000u, 0x3f7a999au, 0x3f7e3333u,};

DEVICE float nf4_level(u32 number) {
  return nf4_levels[number];
}

DEVICE float nf4_scale_level(u32 number) {
  if (number == 127) return 0.0f;
  if (number == 255) return 1.0f;
  return number < 127 ? -float_of(nf4_magnitudes[126 - number]) : float_of(nf4_magnitudes[number - 128]);
}

template <typename Value>
DEVICE void nf4(const unsigned char* section, u64 rows, u64 width, u64 weights, u64 from, u64 stride, Value* out) {
  const float* magnitudes = (const float*)section + 1;
  const u64 blocks = (weights + 63) / 64;
  const unsigned char* scales = section + 4 + 4 * ((blocks + 255) / 256);
  const unsigned char* codes = scales + blocks;
  for (u64 place = first(); place < rows * width; place += further()) {
    const u64 weight = from + place / width * stride + place % width, block = weight / 64;
    const float scale = nf4_scale_level(scales[block]) * magnitudes[block / 256] + magnitudes[-1];
    const u32 pair = codes[weight / 2];
    store(out + place, nf4_level(weight % 2 == 0 ? pair >> 4 : pair & 15u) * scale);
  }
}

#define NF4(Value, dtype) \
  KERNEL shoal_nf4_##dtype( \
      const unsigned char* section, u64 rows, u64 width, u64 weights, u64 from, u64 stride, Value* out) { \
    nf4(section, rows, width, weights, from, stride, out); \
  }

NF4(float, f32)
NF4(u16, bf16)
