-- What replaces functions of Lua's library before they are frozen; see vm.rs. `watch` has the clock looked at in each step that follows.
local watch = ...
local format, sort, move = string.format, table.sort, table.move
local tostring_plain, mostComparisons, mostMoved = tostring, 2 ^ 22, 2 ^ 22

for _, name in { "find", "gmatch", "gsub", "match", "split" } do
    local search = string[name]
    string[name] = function(text, pattern, ...)
        if type(text) == "string" and type(pattern) == "string" then
            -- In one step: each place of the text with all of the pattern.
            local comparisons = #text * #pattern
            if comparisons > mostComparisons then
                error(`string.{name}: the text and the pattern are too long`, 2)
            end
            if comparisons > 2 ^ 16 then
                watch()
            end
        end
        return search(text, pattern, ...)
    end
end

table.move = function(from, first, last, ...)
    -- What is no number moves nothing, and says so.
    local least, most = tonumber(first) or 0, tonumber(last) or 0
    -- Also for what is no number of an element: comparisons with NaN fail.
    if not (math.abs(least) < 2 ^ 31 and math.abs(most) < 2 ^ 31 and most - least < mostMoved) then
        error("table.move: there are too many elements to move", 2)
    end
    watch()
    return move(from, first, last, ...)
end

table.sort = function(list, less)
    return sort(list, less or function(a, b)
        return a < b
    end)
end

local addressed = { table = true, ["function"] = true, userdata = true, buffer = true, thread = true }

local function show(value)
    local kind = type(value)
    -- What an error of SQL's is; only our side makes userdata.
    if kind == "userdata" and typeof(value) == "error" then
        return tostring_plain(value)
    end
    if addressed[kind] then
        local meta = getmetatable(value)
        if type(meta) ~= "table" or rawget(meta, "__tostring") == nil then
            return kind
        end
    end
    return tostring_plain(value)
end

tostring = show

string.format = function(pattern, ...)
    local count = select("#", ...)
    local values = { ... }
    for index = 1, count do
        if addressed[type(values[index])] then
            values[index] = show(values[index])
        end
    end
    return format(pattern, unpack(values, 1, count))
end
