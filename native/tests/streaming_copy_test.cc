#include "streaming_copy.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "check.h"

namespace {

using lohan::StreamingCopy;

constexpr int64_t kMargin = 128;
constexpr std::byte kUntouched{0xA5};

/// Copies `length` bytes from and to memory that begins that far from a line's beginning; checks every byte
/// of the target, and `kMargin` bytes on both sides of it.
void CheckCopy(int64_t length, int64_t source_at, int64_t target_at) {
  std::vector<std::byte> source(static_cast<size_t>(source_at + length));
  for (size_t at = 0; at < source.size(); ++at) source[at] = static_cast<std::byte>(at * 131 + at / 256);
  std::vector<std::byte> target(static_cast<size_t>(target_at + length + 2 * kMargin), kUntouched);
  std::vector<std::byte> expected = target;
  std::copy(source.begin() + source_at, source.end(), expected.begin() + kMargin + target_at);
  StreamingCopy(target.data() + kMargin + target_at, source.data() + source_at, length);
  CHECK(target == expected);
}

TEST(CopiesAnyLengthFromAndToAnyPlace) {
  for (const int64_t length :
       {int64_t{0}, int64_t{1}, int64_t{4096}, (int64_t{1} << 19) - 1, int64_t{1} << 19,
        (int64_t{1} << 19) + 1, (int64_t{1} << 20) + 63, (int64_t{1} << 20) + 65}) {
    for (const int64_t source_at : {0, 1, 16, 63}) {
      for (const int64_t target_at : {0, 1, 15, 16, 48, 63}) CheckCopy(length, source_at, target_at);
    }
  }
}

}  // namespace

int main() { return lohan::test::RunAll(); }
