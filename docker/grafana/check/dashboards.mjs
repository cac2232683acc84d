// Holds dashboards against Grafana's own schema, which it publishes as TypeScript's types: every name and every
// value, those of the panels' options among them. What a plugin fills in by itself may be left out.
//
//   npm ci --prefix docker/grafana/check && node docker/grafana/check/dashboards.mjs DASHBOARD.json...
import { readFileSync } from 'node:fs';
import { basename, join } from 'node:path';
import ts from 'typescript';

const HERE = import.meta.dirname;
const RAW = './node_modules/@grafana/schema/dist/esm/raw/composable';

const TYPES = `
import type { Dashboard, GraphFieldConfig, Panel } from '@grafana/schema';
import type { Options as Stat } from '${RAW}/stat/panelcfg/x/StatPanelCfg_types.gen';
import type { FieldConfig as TableField, Options as Table } from '${RAW}/table/panelcfg/x/TablePanelCfg_types.gen';
import type { Options as Text } from '${RAW}/text/panelcfg/x/TextPanelCfg_types.gen';
import type { Options as TimeSeries } from '${RAW}/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';

// As JSON has it, where an enum's value is a text or a number.
type Plain<T> = T extends string ? \`\${T}\`
    : T extends number ? (\`\${T}\` extends \`\${infer N extends number}\` ? N : T)
    : T extends (infer E)[] ? Plain<E>[]
    : T extends object ? { [K in keyof T]: Plain<T[K]> }
    : T;
type Of<Kind, Options, Custom> = Plain<Omit<Panel<Options, Custom>, 'options' | 'type'>>
    & { type: Kind; options: Plain<Partial<Options>> };
type Known = Of<'stat', Stat, {}> | Of<'table', Table, TableField> | Of<'text', Text, {}> | Of<'timeseries', TimeSeries, GraphFieldConfig>;
`;

// The dashboard as it is, and its panels by their kinds.
function program(path) {
    const dashboard = JSON.parse(readFileSync(path, 'utf8'));
    const text = JSON.stringify(dashboard, null, 2);
    const panels = JSON.stringify(dashboard.panels, null, 2);
    return `${TYPES}
export const dashboard: Plain<Dashboard> = ${text};
export const panels: Known[] = ${panels};
`;
}

function complaints(paths) {
    const options = {
        strict: true, noEmit: true, skipLibCheck: true, types: [],
        module: ts.ModuleKind.ESNext, moduleResolution: ts.ModuleResolutionKind.Bundler,
        target: ts.ScriptTarget.ESNext,
    };
    const host = ts.createCompilerHost(options);
    const sources = new Map(paths.map((path) => [join(HERE, `${basename(path)}.ts`), program(path)]));
    const { getSourceFile, fileExists, readFile } = host;
    host.getSourceFile = (name, ...rest) => sources.has(name)
        ? ts.createSourceFile(name, sources.get(name), ts.ScriptTarget.ESNext)
        : getSourceFile.call(host, name, ...rest);
    host.fileExists = (name) => sources.has(name) || fileExists.call(host, name);
    host.readFile = (name) => sources.get(name) ?? readFile.call(host, name);
    const made = ts.createProgram([...sources.keys()], options, host);
    return ts.formatDiagnostics(ts.getPreEmitDiagnostics(made), host);
}

const paths = process.argv.slice(2);
const said = complaints(paths);
if (said !== '') {
    process.stderr.write(said);
    process.exit(1);
}
paths.forEach((path) => console.log(`${path}: Grafana's schema takes it`));
