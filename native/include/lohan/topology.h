// Which CPUs there are to run on, and how they share cores and memory.
#pragma once

#include <string>
#include <vector>

namespace lohan {

/// A CPU as the kernel numbers it. `core` and `node` number the physical core and the NUMA node it belongs
/// to; where the system does not tell, each CPU is its own core and all are of node 0.
struct Cpu {
  int number = 0;
  int core = 0;
  int node = 0;
};

/// The CPUs in the calling thread's affinity mask, in the order of their numbers. Empty when the system does
/// not tell (more CPUs than a fixed-size mask holds, 1,024). `root` is the system's /sys.
std::vector<Cpu> AllowedCpus(const std::string& root = "/sys");

/// One CPU for each of `threads` workers, in the order of their nodes, so that workers with neighbouring
/// numbers share memory: from all nodes alike, and a second thread of a core only when every core has one.
/// Empty when there are more workers than CPUs: then the scheduler places them better.
std::vector<Cpu> ChooseCpus(const std::vector<Cpu>& allowed, int threads);

}  // namespace lohan
