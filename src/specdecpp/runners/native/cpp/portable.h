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
