// On which NUMA nodes memory lies. Raw system calls: libnuma is not needed, and containers may refuse them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace lohan {

/// A set of NUMA nodes, bit by bit, as the kernel takes it. 1,024 is the most a kernel is built for.
struct NodeSet {
  static constexpr int kMaximum = 1024;
  std::array<unsigned long, kMaximum / (8 * sizeof(unsigned long))> bits{};

  int count() const;
};

/// Nodes this process may take memory from (its cpuset); none where the kernel does not tell.
NodeSet AllowedNodes();

/// Pages of the range that are touched from now on are taken from the nodes in turn. `begin` is page aligned.
/// Returns 0, or the error number of a refusal.
int Interleave(std::byte* begin, int64_t size_bytes, const NodeSet& nodes);

/// Interleaves over all allowed nodes where there are several: large buffers are read by all threads and by
/// devices on any node, so no one node's memory bandwidth may bound them. Advice only: a refusal is ignored,
/// and a policy that was set for the process (numactl) stays.
void SpreadOverNodes(std::byte* begin, int64_t size_bytes);

}  // namespace lohan
