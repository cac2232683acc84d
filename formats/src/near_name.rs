//! The likely meaning of a misspelt name.

/// The known name that is nearest to a given one, if it is near: at most a third of its letters differ.
pub fn closest<'a>(given: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let near = |name: &&str| distance(given, name);
    let nearest = known.min_by_key(near)?;
    (near(&nearest) <= nearest.chars().count().max(3) / 3).then_some(nearest)
}

/// The number of letters to insert, to remove, to replace or to swap with the next, that makes one text the other.
fn distance(one: &str, other: &str) -> usize {
    let (one, other): (Vec<char>, Vec<char>) = (one.chars().collect(), other.chars().collect());
    let mut before: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=other.len()).collect();
    for (row, letter) in one.iter().enumerate() {
        let mut next = vec![row + 1];
        for (column, wanted) in other.iter().enumerate() {
            let replaced = last[column] + usize::from(letter != wanted);
            let mut least = replaced.min(last[column + 1] + 1).min(next[column] + 1);
            let swapped = row > 0 && column > 0 && *letter == other[column - 1];
            if swapped && one[row - 1] == *wanted {
                least = least.min(before[column - 1] + 1);
            }
            next.push(least);
        }
        before = std::mem::replace(&mut last, next);
    }
    last.last().copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_count_changed_letters() {
        let cases = [("", "", 0), ("a", "", 1), ("steps", "step", 1), ("setps", "steps", 1)];
        for (one, other, wanted) in
            cases.into_iter().chain([("hiden", "hidden", 1), ("ab", "cd", 2)])
        {
            assert_eq!(
                (distance(one, other), distance(other, one)),
                (wanted, wanted),
                "{one} {other}"
            );
        }
    }
}
