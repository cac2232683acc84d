// The gradient of an embedding's rows, as `gradient.rs` adds it on a processor: the gradients of the tokens that read a row
// are added in their order.
//
// Reads the gradient of each token once, and writes each row that was read: at most 8 bytes for each of a token's numbers.

// Row `r` gets the sum of the gradients of tokens `order[starts[r]]` to `order[starts[r + 1] - 1]`.
KERNEL shoal_embedding_rows(
    const float* gradients, u64 rows, u64 width, const i64* starts, const i64* order, float* sums) {
  for (u64 place = first(); place < rows * width; place += further()) {
    const u64 row = place / width, column = place - row * width;
    float sum = 0;
    for (i64 at = starts[row]; at < starts[row + 1]; ++at) sum += gradients[u64(order[at]) * width + column];
    sums[place] = sum;
  }
}

// Adds rows to the sums' rows of these numbers, unless the largest magnitude is above the limit.
KERNEL shoal_add_rows(
    const float* values, u64 rows, u64 width, const i64* numbers, i64* sums, double scale, const u32* largest, u32 limit) {
  if (*largest > limit) return;
  for (u64 place = first(); place < rows * width; place += further()) {
    const u64 row = place / width;
    sums[u64(numbers[row]) * width + (place - row * width)] += i64(rint(double(values[place]) * scale));
  }
}
