// Part of every library: the bytes that megatron_merak/_native.py looks for in its file before it is loaded.
namespace merak {

// What the compiler took the CPU to have, by the names of /proc/cpuinfo.
extern __attribute__((used, visibility("default"))) const char needs_of_cpu[] =
    "merak needs "
#ifdef __AVX2__
    "avx2 "
#endif
#ifdef __FMA__
    "fma "
#endif
#ifdef __BMI2__
    "bmi2 "
#endif
#ifdef __F16C__
    "f16c "
#endif
#ifdef __AVX512F__
    "avx512f "
#endif
#ifdef __AVX512BW__
    "avx512bw "
#endif
#ifdef __AVX512DQ__
    "avx512dq "
#endif
#ifdef __AVX512VL__
    "avx512vl "
#endif
#ifdef __AVX512VBMI__
    "avx512vbmi "
#endif
#ifdef __AVX512VNNI__
    "avx512_vnni "
#endif
#ifdef __AVX512BF16__
    "avx512_bf16 "
#endif
#ifdef __AVX512FP16__
    "avx512_fp16 "
#endif
    ";";

extern __attribute__((used, visibility("default"))) const char interface_of_python[] = "merak interface " MERAK_INTERFACE ";";

}  // namespace merak
