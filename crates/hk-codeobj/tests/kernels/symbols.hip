// Symbols of default visibility: the linker leaves their addresses to the loader.
#define SYMBOL __attribute__((device, visibility("default")))
extern SYMBOL __attribute__((weak)) int missing;
SYMBOL int a[4] = {1, 2, 3, 4};
__attribute__((device)) int b, *table[3] = {&b, a + 1, &missing};
extern "C" __attribute__((global)) void symbols(int i) { *table[i] = i; }
