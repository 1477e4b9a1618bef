#include "direct_alignment.h"

#include <fcntl.h>
#include <linux/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstddef>

namespace lohan {
namespace {

// The kernel's struct statx by its fixed binary layout: headers older than the kernel lack these members.
struct StatxReply {
  uint32_t mask;
  std::array<uint32_t, 37> not_used;
  uint32_t direct_memory_alignment;
  uint32_t direct_offset_alignment;
  std::array<uint64_t, 12> spare;
};
constexpr unsigned kDirectAlignmentMask = 0x2000;
static_assert(sizeof(StatxReply) == 256);
#ifdef STATX_DIOALIGN
static_assert(STATX_DIOALIGN == kDirectAlignmentMask);
static_assert(offsetof(StatxReply, direct_memory_alignment) == offsetof(struct statx, stx_dio_mem_align));
static_assert(offsetof(StatxReply, direct_offset_alignment) == offsetof(struct statx, stx_dio_offset_align));
#endif

}  // namespace

std::optional<DirectAlignment> AskDirectAlignment(int descriptor) {
  StatxReply reply{};
  const long result = syscall(SYS_statx, descriptor, "", AT_EMPTY_PATH, kDirectAlignmentMask, &reply);
  if (result != 0 || (reply.mask & kDirectAlignmentMask) == 0) return std::nullopt;
  return DirectAlignment{reply.direct_memory_alignment, reply.direct_offset_alignment};
}

}  // namespace lohan
