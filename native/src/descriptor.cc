#include "lohan/descriptor.h"

#include <unistd.h>

#include <utility>

#include "system.h"

namespace lohan {

Descriptor::Descriptor(Descriptor&& other) noexcept : value_(std::exchange(other.value_, -1)) {}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  std::swap(value_, other.value_);
  return *this;
}

Descriptor::~Descriptor() {
  if (is_open()) close(value_);
}

void Descriptor::Close(const std::string& path) {
  if (!is_open()) return;
  const int value = std::exchange(value_, -1);
  // Linux frees the descriptor even when close is interrupted; a repetition could close somebody else's.
  CheckedCall("close", path, std::nullopt, [&] { return close(value); }, OnInterrupt::kReport);
}

}  // namespace lohan
