"""What `benchmarks.bench_search` is made of: sessions, classes of devices, finders, figures."""
