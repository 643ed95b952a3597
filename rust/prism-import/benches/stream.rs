//! A trace of 10 GB, made while it is read: time and memory. `cargo bench -p prism-import --bench stream [-- GIGABYTES]`.

use prism_import::kineto::event::Names;
use prism_import::kineto::read::read_stream;
use std::io::{BufReader, Read, Write};
use std::path::Path;

/// Events of the host between two kernels, as a trace with stacks has them.
const BETWEEN: u64 = 400;
/// Most memory the reader may take: what matters of the trace, and its buffers.
const MAX_RSS: u64 = 256 << 20;

struct Generated {
    left: u64,
    number: u64,
    text: Vec<u8>,
    at: usize,
    is_over: bool,
}

impl Generated {
    fn new(bytes: u64) -> Self {
        let text = br#"{"schemaVersion":1,"distributedInfo":{"rank":0,"world_size":1},"traceEvents":["#.to_vec();
        Self { left: bytes, number: 0, text, at: 0, is_over: false }
    }

    fn next_events(&mut self) {
        self.text.clear();
        self.at = 0;
        let n = self.number;
        self.number += 1;
        for k in 0..BETWEEN {
            let ts = n * 1000 + k;
            write!(
                self.text,
                r#"{{"ph":"X","cat":"python_function","name":"torch/nn/modules/module.py(1234): _call_impl","pid":1,"tid":1,"ts":{ts}.125,"dur":0.5,"args":{{"Python id":{k},"Python parent id":3,"Ev Idx":{k}}}}},"#
            )
            .expect("memory can be written to");
        }
        let (launch, start) = (n * 1000 + 500, n * 1000 + 520);
        write!(
            self.text,
            r#"{{"ph":"X","cat":"cuda_runtime","name":"cudaLaunchKernel","pid":1,"tid":1,"ts":{launch},"dur":4,"args":{{"correlation":{n}}}}},{{"ph":"X","cat":"kernel","name":"gemm","pid":0,"tid":7,"ts":{start},"dur":300,"args":{{"device":0,"stream":7,"correlation":{n}}}}}"#
        )
        .expect("memory can be written to");
        self.is_over = self.text.len() as u64 >= self.left;
        self.left = self.left.saturating_sub(self.text.len() as u64);
        self.text.extend_from_slice(if self.is_over { b"]}" } else { b"," });
    }
}

impl Read for Generated {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if self.at == self.text.len() {
            if self.is_over {
                return Ok(0);
            }
            self.next_events();
        }
        let length = buffer.len().min(self.text.len() - self.at);
        buffer[..length].copy_from_slice(&self.text[self.at..self.at + length]);
        self.at += length;
        Ok(length)
    }
}

/// A line of `/proc/self/status` in bytes.
fn status(name: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").expect("this runs on Linux");
    let line = text.lines().find(|line| line.starts_with(name)).expect("the kernel tells it");
    let kib: u64 = line.split_whitespace().nth(1).and_then(|kib| kib.parse().ok()).expect("it is a number of KiB");
    kib << 10
}

/// CPU time of the process, s.
fn cpu_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").expect("this runs on Linux");
    let fields: Vec<&str> = text.rsplit(") ").next().expect("it has a name").split(' ').collect();
    let ticks: f64 = fields[11].parse::<f64>().expect("a number") + fields[12].parse::<f64>().expect("a number");
    ticks / 100.0
}

#[allow(clippy::print_stdout, reason = "it is what a benchmark is for")]
fn main() {
    let gigabytes = std::env::args().skip(1).find_map(|word| word.parse::<f64>().ok()).unwrap_or(10.0);
    let bytes = (gigabytes * 1e9) as u64;
    let before = cpu_seconds();
    let reader = BufReader::with_capacity(1 << 18, Generated::new(bytes));
    let trace = read_stream(reader, Path::new("generated"), "generated".to_owned(), &mut Names::default())
        .expect("it is a trace");
    let took = cpu_seconds() - before;
    let kernels = trace.activities.len() as u64;
    assert_eq!(trace.num_events, kernels * (BETWEEN + 2), "every event is counted");
    assert_eq!(trace.calls.len() as u64, kernels, "every launch is kept");
    let rss = status("VmHWM");
    assert!(rss < MAX_RSS, "{rss} bytes of memory");
    println!(
        "{gigabytes} GB, {} events, {kernels} kernels: {took:.1} CPU s (making them included), {:.0} MB/s, peak {:.1} MiB",
        trace.num_events,
        gigabytes * 1000.0 / took,
        rss as f64 / f64::from(1 << 20)
    );
}
