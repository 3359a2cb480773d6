//! Build-script helper: compiles HIP kernels for every target and embeds the code objects.
