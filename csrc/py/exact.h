// Every product and every sum is rounded by itself, as Python and NumPy round them: no fused multiply-add. To be included
// before anything else, as it holds for what follows.
#pragma once

#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif
