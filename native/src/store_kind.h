// How the kernels write their results. Without inline functions, so that the kernels may include it.
#pragma once

namespace lohan {

/// An ordinary store reads its line from memory before it changes it (read for ownership), and the line goes
/// back when it leaves the caches. In place the line is there already. Elsewhere that reading is traffic for
/// nothing: an update of split fp32 states reads 14 bytes a parameter and writes 12, and would read 12 more:
/// 38 instead of 26. Streaming stores write whole lines past the caches. They need targets aligned to whole
/// lines, and a fence before another thread is told that they are there.
enum class StoreKind { kOrdinary, kStreaming };

}  // namespace lohan
