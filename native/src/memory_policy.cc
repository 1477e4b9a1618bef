#include "memory_policy.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <bit>
#include <cerrno>

namespace lohan {

int NodeSet::count() const {
  int total = 0;
  for (const unsigned long word : bits) total += std::popcount(word);
  return total;
}

NodeSet AllowedNodes() {
  NodeSet nodes;
  const long result =
      syscall(SYS_get_mempolicy, nullptr, nodes.bits.data(), NodeSet::kMaximum, nullptr, MPOL_F_MEMS_ALLOWED);
  return result == 0 ? nodes : NodeSet{};
}

int Interleave(std::byte* begin, int64_t size_bytes, const NodeSet& nodes) {
  // mbind reads one bit less than it is told.
  const long result =
      syscall(SYS_mbind, begin, size_bytes, MPOL_INTERLEAVE, nodes.bits.data(), NodeSet::kMaximum + 1, 0);
  return result == 0 ? 0 : errno;
}

void SpreadOverNodes(std::byte* begin, int64_t size_bytes) {
  const NodeSet nodes = AllowedNodes();
  if (nodes.count() < 2) return;
  int policy = MPOL_DEFAULT;
  if (syscall(SYS_get_mempolicy, &policy, nullptr, 0, nullptr, 0) != 0 || policy != MPOL_DEFAULT) return;
  static_cast<void>(Interleave(begin, size_bytes, nodes));
}

}  // namespace lohan
