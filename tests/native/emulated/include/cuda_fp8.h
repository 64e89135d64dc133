// Nothing: below sm_89 the kernels have their own conversions.
#pragma once
