// The scaling of an image on the host: what `scaled_by_numpy` in `image_scaling.py` computes, to the
// bit, in one pass over the memory.

#include <cstddef>
#include <cstdint>
#include <cstring>

// The machine that runs this may have wider registers than the one that it is compiled for.
#if defined(__x86_64__) && defined(__GLIBC__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx2", "default"), flatten))
#else
#define FOR_EACH_PROCESSOR
#endif

namespace {

// The old pixels of which each new one is the weighted sum; see `Terms` in `image_scaling.py`.
struct Terms {
  const int64_t* places;
  const float* weights;
  size_t pixels;  // new ones
  size_t count;   // of terms of a pixel

  int64_t place(size_t pixel, size_t term) const { return places[pixel * count + term]; }
  float weight(size_t pixel, size_t term) const { return weights[pixel * count + term]; }
};

// Functions of each old value and a number, one after the other; see `PixelFunction` in
// `image_scaling.py`.
enum Function : uint8_t {
  kAdd = 0,
  kSubtract = 1,
  kSubtractFrom = 2,
  kMultiply = 3,
  kDivide = 4,
};

struct Functions {
  const uint8_t* kinds;
  const float* numbers;
  size_t count;

  void apply(float* values, size_t length) const {
    for (size_t i = 0; i < count; ++i) {
      const float number = numbers[i];
      switch (kinds[i]) {
        case kAdd: each(values, length, [=](float value) { return value + number; }); break;
        case kSubtract: each(values, length, [=](float value) { return value - number; }); break;
        case kSubtractFrom: each(values, length, [=](float value) { return number - value; }); break;
        case kMultiply: each(values, length, [=](float value) { return value * number; }); break;
        case kDivide: each(values, length, [=](float value) { return value / number; }); break;
      }
    }
  }

  template <typename Change>
  static void each(float* values, size_t length, Change change) {
    for (size_t i = 0; i < length; ++i) values[i] = change(values[i]);
  }
};

// The values of a pixel, and what lies behind them.
typedef float Values __attribute__((vector_size(4 * sizeof(float))));

inline Values weighted(const float* pixel, float weight) {
  Values values;
  std::memcpy(&values, pixel, sizeof(values));
  return values * weight;
}

// The image, and room for what is made of it.
template <typename Pixel>
struct Image {
  const Pixel* pixels;
  size_t length;    // the values of a row
  size_t channels;  // and of a pixel
  Functions functions;
  float* changed;  // room for a row
  float* row;      // likewise, and for `Values` behind its last pixel
};

template <typename Value>
inline void add(const Value* values, float weight, bool is_first, size_t length, float* total) {
  if (is_first) {
    for (size_t i = 0; i < length; ++i) total[i] = static_cast<float>(values[i]) * weight;
  } else {
    for (size_t i = 0; i < length; ++i) total[i] += static_cast<float>(values[i]) * weight;
  }
}

// Stores a row of the image that is scaled in its height.
template <typename Pixel>
inline void scale_down(const Image<Pixel>& image, const Terms& down, size_t row) {
  const size_t length = image.length;
  for (size_t term = 0; term < down.count; ++term) {
    const Pixel* values = image.pixels + down.place(row, term) * length;
    const float weight = down.weight(row, term);
    if (image.functions.count == 0) {
      add(values, weight, term == 0, length, image.row);
    } else {
      for (size_t i = 0; i < length; ++i) image.changed[i] = static_cast<float>(values[i]);
      image.functions.apply(image.changed, length);
      add(image.changed, weight, term == 0, length, image.row);
    }
  }
}

template <size_t kChannels>
inline void scale_across(const float* row, const Terms& across, float* out) {
  for (size_t pixel = 0; pixel < across.pixels; ++pixel, out += kChannels) {
    Values sum = weighted(row + across.place(pixel, 0) * kChannels, across.weight(pixel, 0));
    for (size_t term = 1; term < across.count; ++term) {
      sum += weighted(row + across.place(pixel, term) * kChannels, across.weight(pixel, term));
    }
    std::memcpy(out, &sum, kChannels * sizeof(float));
  }
}

template <typename Pixel>
inline void scale(const Image<Pixel>& image, const Terms& down, const Terms& across, float* out) {
  for (size_t i = 0; i < down.pixels; ++i, out += across.pixels * image.channels) {
    scale_down(image, down, i);
    switch (image.channels) {
      case 1: scale_across<1>(image.row, across, out); break;
      case 2: scale_across<2>(image.row, across, out); break;
      case 3: scale_across<3>(image.row, across, out); break;
      case 4: scale_across<4>(image.row, across, out); break;
    }
  }
}

FOR_EACH_PROCESSOR void scale_bytes(const Image<uint8_t>& image, const Terms& down,
                                    const Terms& across, float* out) {
  scale(image, down, across, out);
}

FOR_EACH_PROCESSOR void scale_floats(const Image<float>& image, const Terms& down,
                                     const Terms& across, float* out) {
  scale(image, down, across, out);
}

}  // namespace

extern "C" {

// Returns the digest of the source that this was built from.
const char* unison_scaling_source() { return UNISON_SOURCE; }

// Scales an image whose rows have `length` values: bytes, or floats of 32 bits. `room` has room for
// two rows, and for four values more.
void unison_scaling_scale(const void* image, int is_bytes, size_t length, size_t channels,
                          const uint8_t* functions, const float* numbers, size_t count,
                          const int64_t* rows, const float* row_weights, size_t new_rows,
                          size_t terms_of_row, const int64_t* columns, const float* column_weights,
                          size_t new_columns, size_t terms_of_column, float* room, float* out) {
  const Functions all{functions, numbers, count};
  const Terms down{rows, row_weights, new_rows, terms_of_row};
  const Terms across{columns, column_weights, new_columns, terms_of_column};
  float* row = room + length;
  if (is_bytes) {
    scale_bytes({static_cast<const uint8_t*>(image), length, channels, all, room, row}, down, across,
                out);
  } else {
    scale_floats({static_cast<const float*>(image), length, channels, all, room, row}, down, across,
                 out);
  }
}

}  // extern "C"
