//! What `shoal data prepare` says about data that is likely not meant, with the cause and a remedy.

use std::collections::BTreeMap;

use shoal_data::PrepareOptions;
use shoal_data::document::TrainOn;
use shoal_data::pack::Packing;
use shoal_data::prepare::{FEWEST, LeftOut, Notes};
use shoal_data::prepared::Index;
use shoal_data::source::RowKind;
use shoal_data::template::ChatTemplate;

use crate::terminal::outln;

/// Prints the notes.
pub(super) fn say(index: &Index, notes: &Notes, options: &PrepareOptions, kind: RowKind) {
    let lines = [
        held_out(index, options),
        empty(index),
        untaught(index, notes),
        left_out(notes),
        unknown(notes),
        cut(index, notes, kind),
        left_out_pairs(index, notes),
        padded(index),
        masks(options, kind),
    ];
    lines.into_iter().flatten().for_each(|line| outln!("{line}"));
}

/// Documents of both lists.
fn documents(index: &Index) -> u64 {
    index.documents.train + index.documents.held_out
}

fn held_out(index: &Index, options: &PrepareOptions) -> Option<String> {
    if !index.held_out.is_empty() {
        return None;
    }
    let documents = documents(index);
    if options.held_out > 0.0 {
        return Some(
            "no document was held out: give more documents, or a larger --held-out".to_owned(),
        );
    }
    (documents < FEWEST).then(|| {
        format!(
            "nothing is held out of {documents} documents, so no evaluation shows whether the model only learns \
             them by heart: --held-out 0.1 holds some out"
        )
    })
}

fn empty(index: &Index) -> Option<String> {
    let empty = index.documents.empty;
    (empty > 0).then(|| format!("{empty} empty documents were left out"))
}

/// Documents without a target; a warning if they are more than one in a hundred.
fn untaught(index: &Index, notes: &Notes) -> Option<String> {
    let (untaught, all) = (index.documents.without_target, documents(index));
    let warning = if untaught * 100 > all { "warning: " } else { "" };
    let roles: Vec<&str> = notes.untaught.iter().map(String::as_str).collect();
    let roles = match roles.is_empty() {
        true => "so look at the roles of their messages".to_owned(),
        false => format!(
            "their roles are {}, and only the text of `assistant` is one, so rename the roles",
            roles.join(", ")
        ),
    };
    (untaught > 0).then(|| {
        format!(
            "{warning}nothing is learnt from {untaught} of {all} documents: they have no target; {roles}, or use \
             --train-on all"
        )
    })
}

/// Messages by role.
fn counts(roles: &BTreeMap<String, u64>) -> String {
    let counts = roles.iter().map(|(role, count)| format!("{count} of the role {role:?}"));
    counts.collect::<Vec<_>>().join(", ")
}

/// A warning where messages have roles that no model has seen.
fn unknown(notes: &Notes) -> Option<String> {
    let counts = counts(&notes.unknown);
    (!counts.is_empty()).then(|| {
        format!(
            "warning: messages have roles that the chat template does not know, and it writes them as they are: \
             {counts}; rename them to system, user, assistant or tool"
        )
    })
}

fn left_out(notes: &Notes) -> Option<String> {
    let counts = counts(&notes.left_out);
    (!counts.is_empty()).then(|| {
        format!(
            "warning: the chat template leaves the text of messages out: {counts}; rename a role that it does not \
             know (to system, user, assistant or tool), or give another template with --chat-template FILE"
        )
    })
}

/// A warning where most chats are longer than a row. Long texts are cut by design.
fn cut(index: &Index, notes: &Notes, kind: RowKind) -> Option<String> {
    let (all, context) = (documents(index), index.context);
    let many = notes.cut * 2 > all && (kind != RowKind::Text || index.packing == Packing::BestFit);
    let totals = [index.train_totals, index.held_out_totals];
    let tokens: u64 = totals.iter().map(|totals| totals.targets + totals.masked).sum();
    many.then(|| {
        format!(
            "warning: {} of {all} documents are longer than a row of {context} tokens and are cut: they have {} \
             tokens on average, so raise --context",
            notes.cut,
            tokens / all.max(1)
        )
    })
}

/// Pairs that are in no row; a warning if they are more than one in a hundred.
fn left_out_pairs(index: &Index, notes: &Notes) -> Option<String> {
    let LeftOut { long, same, without_target } = notes.pairs;
    let context = index.context;
    let causes = [
        (long, format!("longer than a row of {context} tokens, which takes both sequences")),
        (same, "with a chosen and a rejected completion of the same tokens".to_owned()),
        (without_target, "with a completion without a target".to_owned()),
    ];
    let causes = causes.iter().filter(|(count, _)| *count > 0);
    let causes: Vec<String> = causes.map(|(count, cause)| format!("{count} {cause}")).collect();
    let left_out = long + same + without_target;
    let many = left_out * 100 > documents(index) + left_out;
    let (warning, remedy) = (
        if many { "warning: " } else { "" },
        if long > 0 { "; a larger --context takes longer ones" } else { "" },
    );
    (left_out > 0).then(|| format!("{warning}pairs are left out: {}{remedy}", causes.join(", ")))
}

/// A warning where most of the rows is padding.
fn padded(index: &Index) -> Option<String> {
    let totals = index.train_totals;
    let labels = totals.targets + totals.masked + totals.padded;
    let many = totals.padded * 2 > labels;
    let used = (totals.targets + totals.masked) / totals.rows.max(1);
    let context = index.context;
    let remedy = match index.packing {
        Packing::Concat => "the data has fewer tokens than a row, so lower --context",
        Packing::BestFit => "lower --context, or use --pack concat",
        Packing::Pairs => "lower --context: pairs that are longer are left out",
    };
    many.then(|| {
        format!(
            "warning: {} % of the rows is padding, which costs as much as text: a row of {context} tokens has {used} \
             of the documents on average; {remedy}",
            totals.padded * 100 / labels.max(1)
        )
    })
}

/// How targets are found where the template does not mark them.
fn masks(options: &PrepareOptions, kind: RowKind) -> Option<String> {
    let is_chat = matches!(kind, RowKind::Messages | RowKind::Conversations | RowKind::Instruction);
    if !is_chat || options.train_on == TrainOn::All {
        return None;
    }
    let source = ChatTemplate::find(&options.base, options.chat_template.as_deref()).ok()?;
    (!ChatTemplate::marks(&source)).then(|| {
        "the chat template marks no answers, so they are found by role: `shoal data show --text` shows the targets"
            .to_owned()
    })
}
