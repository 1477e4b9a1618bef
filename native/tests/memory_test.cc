#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "check.h"
#include "lohan/aligned_buffer.h"
#include "lohan/error.h"
#include "memory_policy.h"

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

struct Policy {
  int mode;
  NodeSet nodes;
};

Policy PolicyAt(const std::byte* address) {
  Policy policy{MPOL_DEFAULT, {}};
  const long result = syscall(SYS_get_mempolicy, &policy.mode, policy.nodes.bits.data(), NodeSet::kMaximum,
                              address, MPOL_F_ADDR);
  if (result != 0) test::Skip("get_mempolicy is refused here (a container's seccomp profile does that)");
  return policy;
}

TEST(LargeBuffersAreInterleavedWhereThereAreSeveralNodes) {
  AlignedBuffer buffer(4 * kMib);
  const Policy policy = PolicyAt(buffer.data());
  const NodeSet allowed = AllowedNodes();
  CHECK(allowed.count() >= 1);
  AlignedBuffer other(2 * kMib);
  if (Interleave(other.data(), 2 * kMib, allowed) != 0) test::Skip("mbind is refused here");
  CHECK_EQUAL(policy.mode, allowed.count() > 1 ? MPOL_INTERLEAVE : MPOL_DEFAULT);
  CHECK_EQUAL(policy.nodes.count(), allowed.count() > 1 ? allowed.count() : 0);
  AlignedBuffer small(1 * kMib);
  CHECK_EQUAL(PolicyAt(small.data()).mode, MPOL_DEFAULT);
}

TEST(InterleavingReachesEveryPageAndKeepsTheBytes) {
  AlignedBuffer buffer(4 * kMib);
  std::memset(buffer.data(), 7, 4 * kMib);
  const NodeSet allowed = AllowedNodes();
  const int refusal = Interleave(buffer.data(), 4 * kMib, allowed);
  if (refusal == EPERM || refusal == ENOSYS) test::Skip("mbind is refused here");
  CHECK_EQUAL(refusal, 0);
  for (const int64_t offset : {int64_t{0}, 2 * kMib, 4 * kMib - 1}) {
    const Policy policy = PolicyAt(buffer.data() + offset);
    CHECK_EQUAL(policy.mode, MPOL_INTERLEAVE);
    CHECK(policy.nodes.bits == allowed.bits);
  }
  CHECK(std::all_of(buffer.data(), buffer.data() + 4 * kMib,
                    [](std::byte value) { return value == std::byte{7}; }));
  CHECK_EQUAL(Interleave(buffer.data(), 4 * kMib, NodeSet{}), EINVAL);
}

}  // namespace
}  // namespace lohan

int main() { return lohan::test::RunAll(); }
