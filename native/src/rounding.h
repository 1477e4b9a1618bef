#pragma once

#include <cstdint>

namespace lohan {

inline int64_t RoundDown(int64_t value, int64_t multiple) { return value / multiple * multiple; }
inline int64_t RoundUp(int64_t value, int64_t multiple) { return RoundDown(value + multiple - 1, multiple); }

}  // namespace lohan
