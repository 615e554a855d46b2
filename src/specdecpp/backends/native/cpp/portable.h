// Code for other machines asks for functions by the versions that glibc has had from the beginning. Those of 2.29 differ in how they
// tell of errors, which nobody reads here, and would keep the code from systems that torch runs on.
#if defined(__linux__) && defined(__x86_64__)
asm(".symver exp, exp@GLIBC_2.2.5");
asm(".symver log, log@GLIBC_2.2.5");
asm(".symver pow, pow@GLIBC_2.2.5");
#elif defined(__linux__) && defined(__aarch64__)
asm(".symver exp, exp@GLIBC_2.17");
asm(".symver log, log@GLIBC_2.17");
asm(".symver pow, pow@GLIBC_2.17");
#endif

// libstdc++ 12 and later have vectors tell of a size beyond all memory by a function that older ones lack.
#if defined(__linux__)
#include <new>
namespace std {
[[noreturn]] __attribute__((visibility("hidden"))) void __throw_bad_array_new_length() { throw bad_alloc(); }
}  // namespace std
#endif
