//! Prepares data from the command line: `prepare BASE OUT CONTEXT SOURCE... [--flag VALUE]...`.

use std::error::Error;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Instant;

use shoal_data::{PrepareOptions, prepare};

fn main() -> Result<(), Box<dyn Error>> {
    let (mut places, mut flags) = (Vec::new(), Vec::new());
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.strip_prefix("--") {
            Some(flag) => {
                let value = arguments.next().ok_or_else(|| format!("--{flag} needs a value"))?;
                flags.push((flag.to_owned(), value));
            }
            None => places.push(argument),
        }
    }
    let [base, out, context, sources @ ..] = &places[..] else {
        return Err("prepare BASE OUT CONTEXT SOURCE... [--flag VALUE]...".into());
    };
    let mut options = PrepareOptions::new(sources.to_vec(), base.into(), context.parse()?);
    for (flag, value) in flags {
        match flag.as_str() {
            "format" => options.format = value.parse()?,
            "train-on" => options.train_on = value.parse()?,
            "pack" => options.pack = value.parse()?,
            "held-out" => options.held_out = value.parse()?,
            "shard-bytes" => options.shard_bytes = value.parse()?,
            "threads" => options.threads = Some(value.parse()?),
            "chat-template" => options.chat_template = Some(value.into()),
            "date" => options.date = Some(value.parse()?),
            "line-bytes" => options.line_bytes = value.parse()?,
            other => return Err(format!("--{other} is unknown").into()),
        }
    }
    let started = Instant::now();
    let mut last = None;
    let index = prepare(&options, &PathBuf::from(out), |progress| {
        last = Some(progress);
        ControlFlow::Continue(())
    })?;
    let seconds = started.elapsed().as_secs_f64();
    println!("{}", index.hash());
    println!("{:?}\n{:?}", index.documents, index.train_totals);
    if let Some(last) = last {
        let rate = last.bytes_total as f64 / seconds / 1e6;
        println!("{} tokens in {seconds:.2} s: {rate:.1} MB/s of sources", last.tokens);
    }
    Ok(())
}
