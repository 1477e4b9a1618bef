#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "check.h"
#include "lohan/aligned_buffer.h"
#include "lohan/error.h"

namespace lohan {
namespace {

constexpr int64_t kMib = int64_t{1} << 20;

TEST(MemoryIsZeroPageAlignedAndWritableToItsLastByte) {
  for (const int64_t size :
       {int64_t{1}, int64_t{4095}, int64_t{4096}, int64_t{4097}, 2 * kMib, 5 * kMib + 3}) {
    AlignedBuffer buffer(size);
    CHECK_EQUAL(buffer.size_bytes(), size);
    const auto address = reinterpret_cast<uintptr_t>(buffer.data());
    CHECK_EQUAL(address % static_cast<uintptr_t>(size >= 2 * kMib ? 2 * kMib : PageBytes()), 0u);
    CHECK(std::all_of(buffer.data(), buffer.data() + size,
                      [](std::byte value) { return value == std::byte{0}; }));
    std::memset(buffer.data(), 0xAB, static_cast<size_t>(size));
  }
}

TEST(BadSizesAreRefused) {
  CHECK_THROWS(std::invalid_argument, "size_bytes is 0", AlignedBuffer(0));
  CHECK_THROWS(std::invalid_argument, "size_bytes is -4", AlignedBuffer(-4));
  CHECK_THROWS(OutOfMemory, "cannot map", AlignedBuffer(int64_t{1} << 60));
}

TEST(AForkedChildSeesZeros) {
  AlignedBuffer buffer(4 * kMib);
  std::memset(buffer.data(), 1, 4 * kMib);
  const pid_t child = fork();
  if (child == 0) _exit(buffer.data()[3 * kMib] == std::byte{0} ? 0 : 1);
  int status = 0;
  CHECK_EQUAL(waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status));
  CHECK_EQUAL(WEXITSTATUS(status), 0);
  CHECK(buffer.data()[3 * kMib] == std::byte{1});
}

}  // namespace
}  // namespace lohan

int main() { return lohan::test::RunAll(); }
